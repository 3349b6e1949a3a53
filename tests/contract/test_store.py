"""The store: what it mends by itself, what it repeats, and when it gives up."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis

from lisa.core import scripts
from lisa.core.address import Address
from lisa.core.connection import AsyncConnection, Connection
from lisa.core.errors import ConfigError, GroupRemoved, LisaError, ServerUnavailable
from lisa.core.keys import Keys
from lisa.core.patience import MOST_MENDS
from lisa.core.store import AsyncStore, SyncStore
from lisa.core.transitions.ack import Ack, Acked, Settlement
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.open import Open
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.undeclare import Undeclare
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.contract.bench import TOPIC, item
from tests.contract.life import EXPECTED, life
from tests.contract.state import G, Row
from tests.rows import enqueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lisa.core.flow import Command
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000


def store_on(url: str, **options: Any) -> SyncStore:
    patience = options.pop("patience", timedelta(seconds=10))
    return SyncStore(Connection(Address(url, **options)), Keys(), patience)


class Flushing(Connection):
    """Before each command, the server forgets all scripts."""

    def execute(self, command: Command) -> Any:
        if command[0] == "EVALSHA" and not self.just_loaded:
            super().execute(("SCRIPT", "FLUSH"))
        self.just_loaded = command[0] == "SCRIPT"
        return super().execute(command)

    def execute_many(self, commands: Any) -> list[Any]:
        super().execute(("SCRIPT", "FLUSH"))
        return super().execute_many(commands)

    just_loaded = False


class Lossy(Connection):
    """The first reply to each command is lost on its way, what was asked having been done."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._asked: set[Any] = set()

    def execute(self, command: Command) -> Any:
        reply = super().execute(command)
        self._lose(tuple(command))
        return reply

    def execute_many(self, commands: Any) -> list[Any]:
        replies = super().execute_many(commands)
        self._lose(len(commands))
        return replies

    def _lose(self, asked: Any) -> None:
        if asked not in self._asked:
            self._asked.add(asked)
            raise redis.ConnectionError("the reply was lost")


def test_a_whole_life(server: str) -> None:
    store = store_on(server)
    assert store.drive(life(store)) == EXPECTED
    store.close()


async def test_a_whole_life_on_asyncio(server: str) -> None:
    store = AsyncStore(AsyncConnection(Address(server)), Keys())
    assert await store.drive(life(store)) == EXPECTED
    await store.close()


@pytest.mark.parametrize("connection", [Flushing, Lossy])
def test_a_whole_life_where(server: str, connection: type[Connection]) -> None:
    store = SyncStore(connection(Address(server)), Keys())
    found = store.drive(life(store))
    lost = Acked.REPEATED if connection is Lossy else Acked.ACKED
    assert found == {**EXPECTED, "acked": [lost, lost]}
    store.close()


def sends(*names: str) -> list[Enqueue]:
    return [enqueue(TOPIC, name[0] * 8, [item(name, "+0", sender=name[0])]) for name in names]


@pytest.mark.parametrize("connection", [Connection, Flushing, Lossy])
def test_a_pipeline(server: str, connection: type[Connection]) -> None:
    store = SyncStore(connection(Address(server)), Keys())
    store.call(Declare(TOPIC, "lisa"))
    assert store.drive(store.run_many(sends("a", "b", "a"))) == [[Sent.ACCEPTED]] * 3
    stats = store.drive(store.stats(TOPIC))
    assert stats == {"sent": 2, "promoted": 2}
    store.close()


def test_what_fails_in_a_pipeline_stands_as_an_error_in_its_place(bench: Bench) -> None:
    bench.put(options={"capacity": "1"}, lisa=G())
    batch: list[Any] = [*sends("a", "b"), Pull(TOPIC, "nobody", "c1", 1)]
    ok, full, removed = bench.store.drive(bench.store.run_many(batch))
    assert ok == [Sent.ACCEPTED]
    assert isinstance(full, LisaError)
    assert isinstance(removed, GroupRemoved)


def test_groups_changed_by_another_hand_are_learnt(bench: Bench) -> None:
    store = bench.store
    other = SyncStore(store.connection, Keys())
    assert store.call(sends("a")[0]) == [Sent.ACCEPTED]
    other.call(Declare(TOPIC, "lisa"))
    other.call(Declare(TOPIC, "audit"))
    assert store.call(Promote(TOPIC)).moved == 2
    assert (store.batch_size(TOPIC), store.batch_size(TOPIC, Inspect)) == (250, 62)
    other.call(Undeclare(TOPIC, "audit", ["a"], drop=True))
    assert store.drive(store.run_many(sends("b"))) == [[Sent.ACCEPTED]]
    with pytest.raises(GroupRemoved, match="group 'audit' is not declared on topic 'orders'"):
        store.call(Pull(TOPIC, "audit", "c1", 1))
    bench.check(
        body={"a": "a-", "b": "b-"}, stats={"sent": 2, "promoted": 2},
        lisa=G(ready=[Row("a", bench.now), Row("b", bench.now)]),
    )  # fmt: skip


@pytest.mark.not_on_fakeredis("its error for a stream that is gone has a text of its own")
def test_a_deleted_stream_is_declared_again(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(retry={"a": FAR}))
    transitions: list[Any] = [Pull(TOPIC, "lisa", "c1", 1), Reclaim(TOPIC, "lisa")]
    for transition in transitions:
        bench.store.ask("DEL", bench.keys.group("lisa").ready)
        bench.call(transition)
        bench.check(body={"a": "A-"}, lisa=G(retry={"a": FAR}))


def test_a_destroyed_group_is_declared_again_in_a_pipeline(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[Row("a", 1)]))
    bench.call(Inspect(TOPIC, ["a"]))
    bench.store.ask("XGROUP", "DESTROY", bench.keys.group("lisa").ready, "lisa")
    pulls = [Pull(TOPIC, "lisa", "c1", 1), Pull(TOPIC, "lisa", "c1", 1)]
    results = bench.store.drive(bench.store.run_many(pulls))
    taken = [one.id for said in results if not isinstance(said, LisaError) for one in said.entries]
    assert taken == ["a"]


class CutWhileMending(Connection):
    """The group is declared, its stream is gone, and the connection when a script is loaded."""

    def execute(self, command: Command) -> Any:
        if command[0] == "HKEYS":
            return [b"lisa"]
        if command[0] == "SCRIPT":
            raise redis.ConnectionError("cut")
        if command[1] == scripts.load(Declare.script).sha:
            raise redis.exceptions.NoScriptError("No matching script")
        raise redis.ResponseError("NOGROUP No such key")


def test_a_connection_cut_while_a_stream_is_mended_is_lisas_error() -> None:
    store = SyncStore(CutWhileMending(Address()), Keys(), timedelta(milliseconds=100))
    with pytest.raises(ServerUnavailable):
        store.call(Reclaim(TOPIC, "lisa"))


def test_a_dead_server_is_given_up_when_patience_ends() -> None:
    patience = timedelta(seconds=0.4)
    store = store_on(f"redis://127.0.0.1:{free_port()}/0", patience=patience)
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match="does not answer"):
        store.call(Promote(TOPIC))
    assert patience.total_seconds() <= time.monotonic() - began < 4 * patience.total_seconds()
    store.close()


def test_a_pipeline_has_one_patience_for_all() -> None:
    patience = timedelta(seconds=0.4)
    store = store_on(f"redis://127.0.0.1:{free_port()}/0", patience=patience)
    began = time.monotonic()
    results = store.drive(store.run_many([Promote(TOPIC)] * 20))
    assert [type(one) for one in results] == [ServerUnavailable] * 20
    assert time.monotonic() - began < 4 * patience.total_seconds()
    store.close()


class Hanging(Connection):
    """Each try takes its time, and comes to nothing."""

    tries = 0

    def execute(self, command: Command) -> Any:
        self.tries += 1
        time.sleep(0.05)
        raise redis.TimeoutError(f"no answer to {command[0]!r}")

    def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        return [self.execute(commands[0])]


def test_what_is_left_of_a_pipeline_when_patience_ends_is_not_tried_again() -> None:
    link = Hanging(Address())
    store = SyncStore(link, Keys(), timedelta(seconds=0.2))
    results = store.drive(store.run_many([Promote(TOPIC)] * 20))
    assert [type(one) for one in results] == [ServerUnavailable] * 20
    assert link.tries < 10, "not once more for each of them"


@pytest.mark.not_on_fakeredis("its error for a stream that is gone has a text of its own")
def test_a_pipeline_mends_as_many_streams_as_are_gone(bench: Bench) -> None:
    topics = [f"orders-{n}" for n in range(2 * MOST_MENDS)]
    for topic in topics:
        bench.call(Declare(topic, "lisa"))
        bench.store.ask("DEL", bench.store.keys.topic(topic).group("lisa").ready)
    results = bench.store.drive(
        bench.store.run_many([Pull(one, "lisa", "c1", 1) for one in topics])
    )
    assert [one for one in results if isinstance(one, LisaError)] == []


async def test_a_dead_server_is_given_up_on_asyncio_too() -> None:
    patience = timedelta(seconds=0.4)
    address = Address(f"redis://127.0.0.1:{free_port()}/0")
    store = AsyncStore(AsyncConnection(address), Keys(), patience)
    with pytest.raises(ServerUnavailable, match="does not answer"):
        await store.call(Promote(TOPIC))
    await store.close()


def test_a_server_that_comes_back_in_time_is_no_error(own_server: EmbeddedServer) -> None:
    store = store_on(own_server.url)
    assert store.call(sends("a")[0]) == [Sent.ACCEPTED]
    own_server.kill()
    own_server.restart()
    assert store.call(sends("a")[0]) == [Sent.ACCEPTED]
    assert store.drive(store.stats(TOPIC)) == {"sent": 1}
    store.close()


def test_a_wrong_password_is_told_at_once() -> None:
    with EmbeddedServer(extra=("--requirepass", "secret")) as locked:
        for password in (None, "wrong"):
            store = store_on(locked.url, password=password, patience=timedelta(minutes=1))
            with pytest.raises(ConfigError, match="refused user or password") as caught:
                store.call(Promote(TOPIC))
            assert "secret" not in str(caught.value)
            store.close()
        store = store_on(locked.url, password="secret")
        assert store.call(sends("a")[0]) == [Sent.ACCEPTED]
        store.close()


def test_a_newer_layout_is_refused(bench: Bench) -> None:
    bench.store.drive(bench.store.check_schema())
    bench.store.drive(bench.store.check_schema())
    bench.store.ask("SET", bench.store.keys.schema, 2)
    with pytest.raises(ConfigError, match="holds layout 2 of prefix 'lisa'; this build knows 1"):
        bench.store.drive(bench.store.check_schema())


def test_prefixes_share_nothing(server: str) -> None:
    one, two = store_on(server), SyncStore(Connection(Address(server)), Keys("other"))
    assert one.call(sends("a")[0]) == [Sent.ACCEPTED]
    two.call(Declare(TOPIC, "lisa"))
    assert two.drive(two.groups(TOPIC)) == ("lisa",)
    assert one.drive(one.groups(TOPIC)) == ()
    assert two.call(Promote(TOPIC)).moved == 0
    for store in (one, two):
        store.close()


def test_a_delivery_past_a_restart_is_still_ones_own(own_server: EmbeddedServer) -> None:
    store = store_on(own_server.url)
    store.call(Declare(TOPIC, "lisa"))
    store.call(sends("a")[0])
    taken = store.call(Pull(TOPIC, "lisa", "c1", 1)).entries
    own_server.kill()
    own_server.restart()
    opened = store.call(Open(TOPIC, "lisa", taken))
    assert opened.envelopes[0] is not None
    receipt = Settlement("a", taken[0].entry, "aaaaaaaa-", 1, 1)
    assert store.call(Ack(TOPIC, "lisa", [receipt])) == [Acked.ACKED]
    store.close()
