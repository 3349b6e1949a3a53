"""Entries of a ready stream, and the one command that reads them for a consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lisa.core.flow import Command

__all__ = ["Entry", "parse_entry", "parse_read", "read_command"]


class Entry(NamedTuple):
    """One entry of a ready stream. What a foreign hand wrote may have an empty or a mangled id."""

    entry: str
    id: str
    due_ms: int
    attempt: int


_new = tuple.__new__


def read_command(stream: str, group: str, consumer: str, count: int, block_ms: int) -> Command:
    """XREADGROUP for entries that nobody was given yet; `block_ms` 0 does not wait at all.

    One stream a call: COUNT is per stream, and one missing group would fail all.
    """
    wait = ("BLOCK", block_ms) if block_ms > 0 else ()
    return ("XREADGROUP", "GROUP", group, consumer, "COUNT", count, *wait, "STREAMS", stream, ">")


def parse_read(reply: Any) -> list[Entry]:
    """The entries of an XREADGROUP or XREAD reply for one stream."""
    if not reply:
        return []
    return [parse_entry(item) for item in reply[0][1]]


def parse_entry(item: Sequence[Any]) -> Entry:
    """One (entry id, flat list of fields) pair. What cannot be read counts as absent."""
    entry, flat = item
    if flat and len(flat) == 4 and flat[0] == b"id" and flat[2] == b"due":  # as a first attempt is
        # Written by __new__ itself: a named tuple's own costs twice as much.
        return _new(Entry, (entry.decode(), flat[1].decode("utf-8", "replace"),
                            _number(flat[3], 0), 1))  # fmt: skip
    fields = dict(zip(flat[::2], flat[1::2], strict=False)) if flat else {}
    return Entry(
        entry.decode(),
        fields.get(b"id", b"").decode("utf-8", "replace"),
        _number(fields.get(b"due"), 0),
        _number(fields.get(b"attempt"), 1),
    )


def _number(value: bytes | None, default: int) -> int:
    try:
        return int(value) if value else default
    except ValueError:
        return default
