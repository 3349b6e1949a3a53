"""Entries of a ready stream, and the command with which a consumer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One entry of a ready stream. The id may be empty or invalid if another program wrote it.

    is_suspect: whether an earlier process ended while it held the message, see decision 33.
    envelope: the message's, if the entry carries it, else empty.
    """

    entry: str
    id: str
    due_ms: int
    attempt: int
    is_suspect: bool = False
    envelope: bytes = b""


_new = tuple.__new__


def read_all_command(
    streams: Sequence[str], group: str, consumer: str, count: int, block_ms: int
) -> tuple[str | int, ...]:
    """XREADGROUP for entries not delivered yet, up to `count` of each stream.

    `block_ms` 0 does not block. One missing group fails the read of all.
    """
    wait = ("BLOCK", block_ms) if block_ms > 0 else ()
    head = ("XREADGROUP", "GROUP", group, consumer, "COUNT", count, *wait, "STREAMS")
    return (*head, *streams, *[">"] * len(streams))


def parse_reads(reply: Any) -> list[tuple[bytes, list[Entry]]]:
    """The streams of an XREADGROUP or XREAD reply with their entries."""
    return [(stream, [parse_entry(item) for item in items]) for stream, items in reply or ()]


def parse_entry(item: Sequence[Any]) -> Entry:
    """Parse one (entry id, flat list of fields) pair; an unreadable field counts as absent."""
    entry, flat = item
    if flat and len(flat) == 4 and flat[0] == b"id" and flat[2] == b"due":  # a first attempt
        message_id = flat[1].decode("utf-8", "replace")
        # tuple.__new__ takes half as long as the named tuple's constructor.
        return _new(Entry, (entry.decode(), message_id, _number(flat[3], 0), 1, False, b""))
    fields = entry_fields(flat)
    return Entry(
        entry.decode(),
        fields.get(b"id", b"").decode("utf-8", "replace"),
        _number(fields.get(b"due"), 0),
        _number(fields.get(b"attempt"), 1),
        b"suspect" in fields,
        fields.get(b"body", b""),
    )


def entry_fields(flat: Sequence[bytes] | None) -> dict[bytes, bytes]:
    """The fields of an entry by name; none if it was deleted."""
    return dict(zip(flat[::2], flat[1::2], strict=False)) if flat else {}


def entry_ms(entry: bytes) -> int:
    """The time in a stream entry's id, in epoch milliseconds."""
    return int(entry.partition(b"-")[0])


def _number(value: bytes | None, default: int) -> int:
    try:
        return int(value) if value else default
    except ValueError:
        return default
