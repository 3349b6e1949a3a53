"""Formats a validation error as one line: source, key, fault and fix."""

from typing import TYPE_CHECKING, Any

from lisa.core.model.errors import ConfigError
from lisa.core.settings.names import kebab

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import ValidationError

    from lisa.core.settings.sources import Source

_SECRET = ("url", "password", "username", "sentinel_password", "sentinel_username", "token")


def explain(error: "ValidationError", sources: "Sequence[Source]") -> ConfigError:
    """A ConfigError for the first fault; further faults appear once it is fixed."""
    fault = error.errors(include_url=False)[0]
    location = fault["loc"]
    origins = (source.name for source in sources if location and source.holds(location))
    origin = next(origins, sources[-1].name)
    return ConfigError(f"{origin}: {_key(location)}{_text(fault)}")


def _key(location: "Sequence[str | int]") -> str:
    key = ""
    for step in location:
        key += f"[{step}]" if isinstance(step, int) else f".{kebab(step)}"
    return f"{key[1:]}: " if key else ""


def _text(fault: "Mapping[str, Any]") -> str:
    if fault["type"] == "missing":
        return "is missing; add it"
    message = str(fault["msg"])
    if fault["type"] == "value_error":
        # Lisa's own checks already name the value and the fix.
        return message.removeprefix("Value error, ")
    text = message[:1].lower() + message[1:]
    if not any(step in _SECRET for step in fault["loc"]):
        text += f", not {fault['input']!r}"
    return f"{text}; put it in quotes" if fault["type"] == "string_type" else text
