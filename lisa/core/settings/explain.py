"""A validation error as one line: source, key, what is wrong, what to do."""

from typing import TYPE_CHECKING, Any

from lisa.core.errors import ConfigError
from lisa.core.settings.names import kebab

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import ValidationError

    from lisa.core.settings.layers import Layers

_SECRET = ("url", "password", "username", "sentinel_password", "sentinel_username")


def explain(error: "ValidationError", layers: "Layers") -> ConfigError:
    """The first fault of a validation; the others show once it is mended."""
    fault = error.errors(include_url=False)[0]
    location = fault["loc"]
    key = _key(location)
    return ConfigError(f"{layers.origin(location)}: {key}{_text(fault)}")


def _key(location: "Sequence[str | int]") -> str:
    key = ""
    for step in location:
        key += f"[{step}]" if isinstance(step, int) else f".{kebab(step)}"
    return f"{key[1:]}: " if key else ""


def _text(fault: "Mapping[str, Any]") -> str:
    if fault["type"] == "missing":
        return "is missing; add it"
    said = str(fault["msg"])
    if fault["type"] == "value_error":
        # Lisa's own checks name value and cure themselves.
        return said.removeprefix("Value error, ")
    text = said[:1].lower() + said[1:]
    if not any(step in _SECRET for step in fault["loc"]):
        text += f", not {fault['input']!r}"
    return f"{text}; put it in quotes" if fault["type"] == "string_type" else text
