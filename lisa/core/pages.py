"""Reading hashes and sorted sets of any size in bounded steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lisa.core.flow import Flow
from lisa.core.keys import check_id

if TYPE_CHECKING:
    from lisa.core.store import Store

__all__ = ["PAGE", "START", "member_page", "readable"]

PAGE = 200
"""Items of one step: far below what takes the server 5 ms."""

START = b"0"
"""The cursor of a SCAN family command that begins, and the one that it ends with."""


def member_page(
    store: Store, command: str, key: str, cursor: bytes
) -> Flow[tuple[bytes, list[bytes]]]:
    """One page of an HSCAN or ZSCAN: the next cursor, and fields or members without values."""
    reply = yield from store.command(command, key, cursor, "COUNT", PAGE)
    return reply[0], list(dict.fromkeys(reply[1][::2]))


def readable(ids: Sequence[bytes]) -> tuple[list[str], list[bytes]]:
    """Ids that Lisa may have written, and those that only a foreign hand can have."""
    names, foreign = [], []
    for one in ids:
        try:
            names.append(check_id(one.decode()))
        except ValueError:  # InvalidMessage is one, UnicodeDecodeError too
            foreign.append(one)
    return names, foreign
