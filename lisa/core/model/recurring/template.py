"""Templates of bodies: texts with placeholders that each occurrence fills in."""

from __future__ import annotations

from datetime import tzinfo
from string import Template
from typing import Any

import msgspec

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import InvalidMessage

PLACEHOLDERS = frozenset({"tick", "tick_ms", "previous", "previous_ms", "count"})


def check_template(kind: str, body: str) -> None:
    """Raise InvalidMessage if a body of that kind is not a template, or names other values."""
    if kind == "b":
        raise InvalidMessage("a template is text or JSON, not bytes")
    template = Template(body)
    unknown = set(template.get_identifiers()) - PLACEHOLDERS
    if unknown or not template.is_valid():
        known = ", ".join(f"${{{name}}}" for name in sorted(PLACEHOLDERS))
        raise InvalidMessage(
            f"the template knows {known}, and $$ for a dollar sign; "
            f"{'unknown: ' + min(unknown) if unknown else 'a $ stands alone'}"
        )


def placeholders(zone: tzinfo, tick_ms: int, previous_ms: int | None, count: int) -> dict[str, Any]:
    """The values of one occurrence by the names of their placeholders."""

    def local(at_ms: int) -> str:
        return ms_datetime(at_ms).astimezone(zone).isoformat()

    return {
        "tick": local(tick_ms),
        "tick_ms": tick_ms,
        "previous": None if previous_ms is None else local(previous_ms),
        "previous_ms": previous_ms,
        "count": count,
    }


def filled(kind: str, body: bytes, values: dict[str, Any]) -> bytes:
    """A body with its placeholders filled in."""
    if kind == "s":
        return _text(body.decode(), values).encode()
    return msgspec.json.encode(_substituted(msgspec.json.decode(body), values))


def _substituted(value: Any, values: dict[str, Any]) -> Any:
    """A JSON value with its texts filled in; a text that is one placeholder becomes its value."""
    if isinstance(value, str):
        if value.startswith("${") and value.endswith("}") and value[2:-1] in values:
            return values[value[2:-1]]
        return _text(value, values)
    if isinstance(value, list):
        return [_substituted(one, values) for one in value]
    if isinstance(value, dict):
        return {key: _substituted(one, values) for key, one in value.items()}
    return value


def _text(text: str, values: dict[str, Any]) -> str:
    shown = {name: "" if value is None else value for name, value in values.items()}
    return Template(text).substitute(shown)
