"""A sender's results if the shards of a topic give different replies."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis

from lisa import AsyncProducer, Producer
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import Misplaced
from lisa.core.store.reshard import spread
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.enqueue import Enqueue
from lisa.manager.sharder import Sharder
from tests.servers import open_store
from tests.shards import ORDERS

if TYPE_CHECKING:
    from lisa.core.redis.flow import Command
    from tests.shards import Split

HOUR = timedelta(hours=1)
SHORT = timedelta(milliseconds=600)
LARGE = "x" * 5000


def limited(split: Split) -> None:
    """Split into two shards that refuse large messages."""
    split.into(2)
    split.store.call(Configure("orders", {"max_body_bytes": "1000"}))
    split.store.drive(spread(split.store, ORDERS))


class RepliesLost:
    """Loses the replies of calls without a large message; they still take effect."""

    def __init__(self, connection: Any) -> None:
        self._one, self._many = connection.execute, connection.execute_many
        self.silent: set[Command] = set()
        connection.execute, connection.execute_many = self.execute, self.execute_many

    async def execute(self, command: Command) -> Any:
        reply = await self._one(command)
        if command in self.silent:
            raise redis.ConnectionError("its reply is lost again")
        return reply

    async def execute_many(self, commands: list[Command]) -> list[Any]:
        replies = list(await self._many(commands))
        is_large = [
            any(isinstance(one, bytes) and len(one) > 4000 for one in command)
            for command in commands
        ]
        if any(is_large) and not self.silent:
            for i, large in enumerate(is_large):
                if not large:
                    self.silent.add(commands[i])
                    replies[i] = redis.ConnectionError("its reply is lost")
        return replies


def test_one_shard_s_refusal_says_nothing_about_a_shard_with_a_lost_reply(
    split_here: Split,
) -> None:
    limited(split_here)

    async def send() -> list[object]:
        async with AsyncProducer(split_here.url, patience=SHORT) as producer:
            await producer.send("orders", "first", delay=HOUR)
            lost = RepliesLost(producer._store.connection)
            sends = [producer.send("orders", body, delay=HOUR) for body in [LARGE, *range(12)]]
            told = await asyncio.gather(*sends, return_exceptions=True)
            assert lost.silent
            return list(told)

    asyncio.run(send())
    with Producer(split_here.url) as producer:
        found = [producer.get("orders", one) for one in split_here.copies()]
    bodies = [one.body for one in found if one is not None]
    assert len(bodies) == len(set(bodies)), "some were sent twice"


def test_one_shard_s_refusal_says_nothing_about_a_shard_that_moves(split_here: Split) -> None:
    limited(split_here)
    layout = split_here.layout
    first, second = layout.current(ORDERS)
    split_here.store.ask("HSET", split_here.keys(second).options, "accepts", layout.number + 3)
    bodies = {
        one: LARGE if layout.shard_for(ORDERS, one) == first else "" for one in map(str, range(12))
    }
    assert set(bodies.values()) == {LARGE, ""}
    envelopes = [encode_envelope("T" * 8, body) for body in bodies.values()]
    send = Enqueue("orders", "T" * 8, list(bodies), ["+60000"], envelopes, are_ids_new=True)
    store = open_store(split_here.url, SHORT)
    store.drive(store.layout(ORDERS))
    with pytest.raises(Misplaced):
        store.call_by_id(send)
    store.close()


def test_misplaced_reports_what_other_shards_accepted(split_here: Split) -> None:
    split_here.into(2)
    number = split_here.layout.number
    split_here.store.ask("HSET", split_here.keys("orders~1of2").options, "accepts", number + 3)
    with Producer(split_here.url, patience=SHORT) as producer, pytest.raises(Misplaced) as caught:
        producer.send_many("orders", range(40), delay=HOUR)  # some in each
    told = [one for one in caught.value.outcomes if one is not None]
    assert 0 < len(told) == len(split_here.copies()) < 40


@pytest.mark.parametrize("name", ["orders~5of4", "orders~0of1", "orders~00of2", "orders~1of99"])
def test_a_shard_of_a_name_that_no_number_of_shards_has_changes_nothing(
    split_here: Split, name: str
) -> None:
    split_here.into(2)
    split_here.store.drive(split_here.store.register([name]))
    before, sharder = split_here.layout, Sharder(split_here.store)
    for topic in sharder.pick(split_here.store.drive(split_here.store.shards())):
        sharder.step(topic)
    assert split_here.layout == before
