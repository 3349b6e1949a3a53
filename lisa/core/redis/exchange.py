"""Sends commands together on one pooled connection, and reads their replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import hiredis
import redis

from lisa.core.redis.flow import Command
from lisa.core.redis.pools import is_usable_after


class Packer:
    """Packs commands without redis-py's per-argument checks, which cost more than the packing."""

    @staticmethod
    def pack(*command: Any) -> list[bytes]:
        """Encode one command. redis-py's own commands may have two words as first argument."""
        words = command[0].split() if isinstance(command[0], str) else [command[0]]
        return [hiredis.pack_command((*words, *command[1:]))]


def packed(commands: Sequence[Command]) -> bytes:
    """Encode commands for one write."""
    return b"".join(part for command in commands for part in Packer.pack(*command))


def exchange(pool: Any, request: bytes, count: int) -> Iterator[Any]:
    """Send packed commands now, and yield their `count` replies, which may include errors.

    The caller must consume all replies; otherwise the connection is closed.
    """
    connection = pool.get_connection()
    try:
        connection.send_packed_command([request])
    except BaseException as error:
        pool.discard(connection, error)
        raise
    return _replies(pool, connection, count)


def _replies(pool: Any, connection: Any, left: int) -> Iterator[Any]:
    fault: BaseException | None = None
    try:
        while left:
            try:
                reply = connection.read_response()
            except redis.ResponseError as error:
                reply = error
                fault = fault if is_usable_after(error) else error
            left -= 1
            yield reply
    except BaseException as error:
        if left:
            pool.discard(connection, error)
        else:
            pool.release(connection)
        raise
    if fault is None:
        pool.keep(connection)
    else:
        pool.discard(connection, fault)


async def aexchange(pool: Any, request: bytes, count: int) -> list[Any]:
    """Send packed commands and return their `count` replies, which may include errors."""
    connection = await pool.get_connection()
    replies: list[Any] = []
    fault: BaseException | None = None
    try:
        await connection.send_packed_command([request])
        while len(replies) < count:
            try:
                replies.append(await connection.read_response())
            except redis.ResponseError as error:
                replies.append(error)
                fault = fault if is_usable_after(error) else error
    except BaseException as error:
        if len(replies) < count:
            await pool.discard(connection, error)
        else:
            await pool.release(connection)
        raise
    if fault is None:
        pool.keep(connection)
    else:
        await pool.discard(connection, fault)
    return replies
