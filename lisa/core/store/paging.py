"""Reads hashes and sorted sets of any size in bounded pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lisa.core.model.keys import check_id
from lisa.core.redis.flow import Flow

if TYPE_CHECKING:
    from lisa.core.store.store import Store

PAGE = 200
"""Items per page: the server takes far less than 5 ms for one."""

START = b"0"
"""The first cursor of a SCAN family command, and the one returned at the end."""


def member_page(
    store: Store, command: str, key: str, cursor: bytes
) -> Flow[tuple[bytes, list[bytes]]]:
    """One page of an HSCAN or ZSCAN: the next cursor, and fields or members without values."""
    reply = yield from store.command(command, key, cursor, "COUNT", PAGE)
    return reply[0], list(dict.fromkeys(reply[1][::2]))


def readable(ids: Sequence[bytes]) -> tuple[list[str], list[bytes]]:
    """Split ids into valid ones and ones that Lisa cannot have written."""
    names, foreign = [], []
    for message_id in ids:
        try:
            names.append(check_id(message_id.decode()))
        except ValueError:  # includes InvalidMessage and UnicodeDecodeError
            foreign.append(message_id)
    return names, foreign
