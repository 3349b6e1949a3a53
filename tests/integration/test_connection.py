"""Commands that are sent together, and whose replies are taken one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from lisa.core.address import Address
from lisa.core.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def connection(redis_url: str) -> Iterator[Connection]:
    connection = Connection(Address.of(redis_url))
    yield connection
    connection.close()


def test_replies_come_in_order_errors_among_them(connection: Connection) -> None:
    replies = connection.begin([("ECHO", "first"), ("NO-SUCH-COMMAND",), ("ECHO", "last")])
    assert next(replies) == b"first"
    assert isinstance(next(replies), redis.ResponseError)
    assert list(replies) == [b"last"]


def test_the_first_reply_is_there_while_a_later_command_waits(connection: Connection) -> None:
    stream = "lisa-test-nothing-comes-here"
    replies = connection.begin([("PING",), ("XREAD", "BLOCK", 60_000, "STREAMS", stream, "$")])
    assert next(replies) == b"PONG"


def test_replies_nobody_took_are_nobody_elses(connection: Connection) -> None:
    replies = connection.begin([("ECHO", "taken"), ("ECHO", "left")])
    assert next(replies) == b"taken"
    del replies
    assert connection.execute(("ECHO", "another")) == b"another"
