"""Formats bodies for the page: JSON indented, text unchanged, bytes as a hex dump; size-limited."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import msgspec

from lisa.core.model.envelope import Envelope

DUMP_BYTES = 2_048
MOST_GROWTH = 4
"""JSON that grows beyond this factor when indented is deeply nested; it is shown unchanged."""

KINDS = {"j": "JSON", "s": "text", "b": "bytes"}


@dataclass(frozen=True, slots=True)
class Body:
    """A formatted body. `more`: only the beginning is included."""

    kind: str
    text: str
    base64: str | None
    more: bool


def shown(envelope: Envelope, *, most: int, whole: bool = True) -> Body:
    """The first `most` bytes of a body, formatted. `whole`: the envelope has the complete body."""
    data, kind = envelope.body[:most], KINDS.get(envelope.kind, "bytes")
    more = not whole or len(envelope.body) > most
    if kind == "JSON" and not more:
        try:
            indented = msgspec.json.format(data, indent=2).decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            kind = "damaged JSON"
        except RecursionError:
            pass  # too deeply nested to indent: shown unchanged
        else:
            if len(indented) <= max(DUMP_BYTES, MOST_GROWTH * len(data)):
                return Body(kind, indented, None, more)
    if kind == "bytes":
        dumped = data[:DUMP_BYTES]
        return Body(
            kind, _dump(dumped), base64.b64encode(dumped).decode(), more or len(data) > DUMP_BYTES
        )
    return Body(kind, data.decode("utf-8", "replace"), None, more)


def _dump(data: bytes) -> str:
    """A hex dump: offset, hexadecimal and ASCII, sixteen bytes per line."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        readable = "".join(chr(one) if 32 <= one < 127 else "." for one in part)
        lines.append(f"{at:06x}  {part.hex(' '):<47}  {readable}")
    return "\n".join(lines)
