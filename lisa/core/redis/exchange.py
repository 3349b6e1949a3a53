"""Sends commands together on one pooled connection, and reads their replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import hiredis
import redis

from lisa.core.redis.errors import is_read_only
from lisa.core.redis.flow import Command


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


def is_usable_after(error: BaseException) -> bool:
    """Whether a connection can be used again: its replies were read, and its server takes writes.

    If it has become a read-only replica, a new connection may reach the primary that replaced it.
    """
    return isinstance(error, redis.ResponseError) and not is_read_only(error)


def exchange(pool: Any, request: bytes, count: int) -> Iterator[Any]:
    """Send packed commands now, and yield their `count` replies, which may include errors.

    The caller must consume all replies; otherwise the connection is closed.
    """
    connection = pool.get_connection()
    try:
        connection.send_packed_command([request])
    except BaseException:
        pool.release(connection)
        raise
    return _replies(pool, connection, count)


def _replies(pool: Any, connection: Any, left: int) -> Iterator[Any]:
    is_usable = True
    try:
        while left:
            try:
                reply = connection.read_response()
            except redis.ResponseError as error:
                reply = error
                is_usable = is_usable and is_usable_after(error)
            left -= 1
            yield reply
    except BaseException:
        if left:
            connection.disconnect()
        pool.release(connection)
        raise
    if is_usable:
        pool.keep(connection)
    else:
        connection.disconnect()
        pool.release(connection)


async def aexchange(pool: Any, request: bytes, count: int) -> list[Any]:
    """Send packed commands and return their `count` replies, which may include errors."""
    connection = await pool.get_connection()
    replies: list[Any] = []
    is_usable = True
    try:
        await connection.send_packed_command([request])
        while len(replies) < count:
            try:
                replies.append(await connection.read_response())
            except redis.ResponseError as error:
                replies.append(error)
                is_usable = is_usable and is_usable_after(error)
    except BaseException:
        if len(replies) < count:
            await connection.disconnect(nowait=True)
        await pool.release(connection)
        raise
    if is_usable:
        pool.keep(connection)
    else:
        await connection.disconnect(nowait=True)
        await pool.release(connection)
    return replies
