"""Reads all the data on a server with plain commands."""

import re
from typing import Any

from lisa.core.redis.connection import Connection

PAGE = ("COUNT", 1000)
READS: dict[bytes, tuple[str, ...]] = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"zset": ("ZRANGE", "0", "-1", "WITHSCORES"),
    b"stream": ("XINFO STREAM", "FULL", "COUNT", "0"),
}


def read(connection: Connection) -> tuple[int, dict[str, Any]]:
    """Redis's clock (microseconds) before the reads, and all keys.

    Each key has its type, its value and its expiry time (-1: never).

    A tombstone is split at its commas. The records of calls are left out: `Stage` repeats calls
    instead.

    A stream has its entries and, by group, the last delivered entry, the pending entries (entry,
    holder, since when, how often) and the consumers' names.
    """
    (seconds, micros), (cursor, keys) = connection.execute_many([("TIME",), ("SCAN", 0, *PAGE)])
    while cursor != b"0":
        cursor, some = connection.execute(("SCAN", cursor, *PAGE))
        keys += some
    keys = sorted(key for key in set(keys) if b":reply:" not in key)
    asked = [(command, key) for command in ("TYPE", "PEXPIRETIME") for key in keys]
    replies = connection.execute_many(asked)
    types, ends = replies[: len(keys)], replies[len(keys) :]
    values = connection.execute_many(
        [_command(key, type_) for key, type_ in zip(keys, types, strict=True)]
    )
    found: dict[str, Any] = {}
    for key, type_, value, end in zip(keys, types, values, ends, strict=True):
        name = key.decode()
        found[name] = (type_.decode(), _value(type_, value), end)
        if ":done:" in name and type_ == b"string":
            found[name] = ("tombstone", value.decode().split(","), end)
        if name.endswith(":keyed"):
            found[name] = (
                "hash",
                {each: _sorted(ids) for each, ids in found[name][1].items()},
                end,
            )
    return int(seconds) * 1_000_000 + int(micros), found


def _command(key: bytes, type_: bytes) -> list[str | bytes]:
    name, *rest = READS[type_]
    return [*name.split(), key, *rest]


def _value(type_: bytes, raw: Any) -> Any:
    if type_ == b"string":
        return raw.decode()
    if type_ == b"hash":
        return {name.decode(): value.decode() for name, value in _pairs(raw).items()}
    if type_ == b"zset":
        return {member.decode(): _whole(score) for member, score in _pairs(raw).items()}
    stream = _pairs(raw)
    return {
        "entries": [[entry.decode(), _fields(flat)] for entry, flat in stream[b"entries"]],
        "groups": {group["name"]: group for group in map(_group, stream[b"groups"])},
    }


def _group(raw: Any) -> dict[str, Any]:
    group = _pairs(raw)
    return {
        "name": group[b"name"].decode(),
        "last": group[b"last-delivered-id"].decode(),
        "pending": [
            [entry.decode(), holder.decode(), since, times]
            for entry, holder, since, times in group[b"pending"]
        ],
        "consumers": sorted(_pairs(one)[b"name"].decode() for one in group[b"consumers"]),
    }


def _sorted(own_ids: str) -> str:
    """The list of a key, whose order has no meaning."""
    return "".join(sorted(re.findall("[^\x1f]+\x1f", own_ids)))


def _fields(flat: list[bytes]) -> dict[str, str]:
    assert len(set(flat[::2])) == len(flat[::2]), f"a field stands twice: {flat}"
    return {name.decode(): value.decode() for name, value in _pairs(flat).items()}


def _pairs(flat: Any) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _whole(score: bytes) -> int:
    assert float(score) == int(float(score)), f"a score with a fraction: {score!r}"
    return int(float(score))
