"""Plain reads over many topics in few round trips, to tell which of them a script is worth.

A script call costs the server and this process some twenty times what a plain read in a pipeline
does, and most topics have nothing to do most of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lisa.core import failures
from lisa.core.flow import Command, ExecuteMany, Flow
from lisa.core.store import SyncStore, chunks

__all__ = ["PAGE", "ask_all", "head_command", "head_ms", "standing", "whole"]

PAGE = 128
"""So many topics are asked about together: some 0.2 ms of the server's time."""


def ask_all(store: SyncStore, commands: Sequence[Command]) -> list[Any]:
    """Plain commands in one round trip; the raw replies, errors of single ones among them.

    Raises ServerUnavailable if the server cannot be reached; nothing is repeated.
    """
    return store.drive(_ask_all(commands, store.where)) if commands else []


def _ask_all(commands: Sequence[Command], where: str) -> Flow[list[Any]]:
    try:
        replies: list[Any] = yield ExecuteMany(commands)
    except failures.ClientError as error:
        raise failures.translated(error, where) from error
    return replies


def head_command(zset: str) -> tuple[str | int, ...]:
    """Asks for the first member of a ZSET and its score."""
    return ("ZRANGE", zset, 0, 0, "WITHSCORES")


def head_ms(reply: Any) -> int | None:
    """The score in the reply to `head_command`; None if there is none, or if it is an error."""
    return int(float(reply[1])) if isinstance(reply, list) and reply else None


def whole(reply: Any, default: int) -> int:
    """The number that a topic's option holds; the default if there is none, or nothing readable.

    What a foreign hand made unreadable is told by the script that meets it, for that topic alone.
    """
    return int(reply) if isinstance(reply, bytes) and reply.isdigit() else default


def standing(store: SyncStore, keys: Mapping[str, Sequence[str]]) -> list[str]:
    """Of topics and keys, those topics of which at least one key exists, or cannot be told.

    One command asks for a whole page of topics; only where that finds something, each topic is
    asked for. On a cluster, where topics lie on several nodes, each is asked for at once.
    """
    pages: Iterable[Sequence[str]] = list(chunks([one for one in keys if keys[one]], PAGE))
    if store.connection.address.kind != "cluster":
        asked = list(pages)
        counts = ask_all(
            store, [("EXISTS", *[key for topic in page for key in keys[topic]]) for page in asked]
        )
        pages = [page for page, count in zip(asked, counts, strict=True) if count != 0]
    found: list[str] = []
    for page in pages:
        counts = ask_all(store, [("EXISTS", *keys[topic]) for topic in page])
        found += [topic for topic, count in zip(page, counts, strict=True) if count != 0]
    return found
