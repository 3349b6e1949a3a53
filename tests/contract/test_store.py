"""The store: repairs, retries, and giving up."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa.core.model.errors import ConfigError, GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import MAX_REPAIRS, Command
from lisa.core.store.store import AsyncStore, SyncStore
from lisa.core.transitions import loader
from lisa.core.transitions.ack import Ack, Acked, Settlement
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.lease import Reclaim
from lisa.core.transitions.promote import Promote
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.life import EXPECTED, life
from tests.contract.state import FAR, G, Row
from tests.rows import enqueue
from tests.servers import shortest_s


def store_on(url: str, **options: Any) -> SyncStore:
    patience = options.pop("patience", timedelta(seconds=10))
    return SyncStore(Connection(Address(url, **options)), Keys(), patience)


class Flushing(Connection):
    """The server forgets all scripts before each command."""

    def execute(self, command: Command) -> Any:
        if command[0] == "EVALSHA" and not self.just_loaded:
            super().execute(("SCRIPT", "FLUSH"))
        self.just_loaded = command[0] == "SCRIPT"
        return super().execute(command)

    def execute_many(self, commands: Any) -> list[Any]:
        self.just_loaded = commands[0][0] == "SCRIPT"
        if not self.just_loaded:
            super().execute(("SCRIPT", "FLUSH"))
        replies: list[Any] = super().execute_many(commands)
        return replies

    just_loaded = False


class Lossy(Connection):
    """The first reply to each command is lost after the command has run."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._asked: set[Any] = set()

    def execute(self, command: Command) -> Any:
        reply = super().execute(command)
        self._lose(tuple(command))
        return reply

    def execute_many(self, commands: Any) -> list[Any]:
        replies: list[Any] = super().execute_many(commands)
        self._lose(len(commands))
        return replies

    def _lose(self, asked: Any) -> None:
        if asked not in self._asked:
            self._asked.add(asked)
            raise redis.ConnectionError("the reply was lost")


async def test_a_whole_life_on_asyncio(server: str) -> None:
    store = AsyncStore(AsyncConnection(Address(server)), Keys())
    assert await store.drive(life(store)) == EXPECTED
    await store.close()


@pytest.mark.parametrize("connection", [Connection, Flushing, Lossy])
def test_a_whole_life(server: str, connection: type[Connection]) -> None:
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


def test_a_failed_call_in_a_pipeline_yields_its_error(bench: Bench) -> None:
    bench.put(options={"capacity": "1"}, lisa=G())
    batch: list[Any] = [*sends("a", "b"), Pull(TOPIC, "absent", "c1", 1)]
    ok, full, removed = bench.store.drive(bench.store.run_many(batch))
    assert ok == [Sent.ACCEPTED]
    assert isinstance(full, LisaError)
    assert isinstance(removed, GroupRemoved)


def test_groups_changed_by_another_program_are_detected(bench: Bench) -> None:
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
        body={"a": "a-", "b": "b-"},
        stats={"sent": 2, "promoted": 2},
        lisa=G(ready=[Row("a", bench.now), Row("b", bench.now)]),
    )


@pytest.mark.parametrize("bench", ["plain"], indirect=True)
@pytest.mark.parametrize("together", [False, True])
def test_a_topics_features_are_learned_and_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, together: bool
) -> None:
    store = bench.store
    bench.put(options={"journal": "1"}, lisa=G(), expiry={"a": FAR}, waiting={"a": 1}, body="a")
    if together:
        (promoted,) = store.drive(store.run_many([Promote(TOPIC)]))
        assert not isinstance(promoted, LisaError)
        assert promoted.moved == 1
    else:
        assert bench.call(Promote(TOPIC)).moved == 1
    assert [event[1] for event in bench.state()["events"]] == ["ready"]
    assert store._features_of(TOPIC) == {"journal", "ttl"}
    monkeypatch.setattr("lisa.core.store.store.FEATURES_AGE_S", 0)
    assert store._features_of(TOPIC) == frozenset()


@pytest.mark.not_on_fakeredis("its error for a stream that is gone has a text of its own")
def test_a_deleted_stream_is_declared_again(bench: Bench) -> None:
    bench.put(body="a", lisa=G(retry={"a": FAR}))
    transitions: list[Any] = [Pull(TOPIC, "lisa", "c1", 1), Reclaim(TOPIC, "lisa")]
    for transition in transitions:
        bench.store.ask("DEL", bench.keys.group("lisa").ready)
        bench.call(transition)
        bench.check(body="a", lisa=G(retry={"a": FAR}))


def test_a_destroyed_group_is_declared_again_in_a_pipeline(bench: Bench) -> None:
    bench.put(body="a", lisa=G(ready=[Row("a", 1)]))
    bench.call(Inspect(TOPIC, ["a"]))
    bench.store.ask("XGROUP", "DESTROY", bench.keys.group("lisa").ready, "lisa")
    pulls = [Pull(TOPIC, "lisa", "c1", 1), Pull(TOPIC, "lisa", "c1", 1)]
    results = bench.store.drive(bench.store.run_many(pulls))
    taken = [one.id for said in results if not isinstance(said, LisaError) for one in said.entries]
    assert taken == ["a"]


class CutWhileMending(Connection):
    """The group is declared, its stream is missing, and loading a script closes the connection."""

    def execute(self, command: Command) -> Any:
        if command[0] == "HKEYS":
            return [b"lisa"]
        if command[1] == loader.load(Declare.script).sha:
            raise redis.exceptions.NoScriptError("No matching script", status_code="NOSCRIPT")
        raise redis.ResponseError("NOGROUP No such key")

    def execute_chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        raise redis.ConnectionError("cut")


def test_a_connection_lost_during_a_repair_raises_lisas_error() -> None:
    store = SyncStore(CutWhileMending(Address()), Keys(), timedelta(milliseconds=100))
    with pytest.raises(ServerUnavailable):
        store.call(Reclaim(TOPIC, "lisa"))


def test_a_dead_server_is_given_up_when_patience_ends() -> None:
    patience = timedelta(seconds=0.4)
    store = store_on(f"redis://127.0.0.1:{free_port()}/0", patience=patience)

    def call() -> None:
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match="does not answer"):
            store.call(Promote(TOPIC))
        assert time.monotonic() - began >= patience.total_seconds()

    limit_s = 4 * patience.total_seconds()
    assert shortest_s(call, limit_s) < limit_s
    store.close()


class Hanging(Connection):
    """Every attempt takes a while and fails."""

    tries = 0

    def execute(self, command: Command) -> Any:
        self.tries += 1
        time.sleep(0.05)
        raise redis.TimeoutError(f"no answer to {command[0]!r}")

    def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        return [self.execute(commands[0])]


def test_the_rest_of_a_pipeline_is_not_retried_after_patience_ends() -> None:
    link = Hanging(Address())
    store = SyncStore(link, Keys(), timedelta(seconds=0.2))
    results = store.drive(store.run_many([Promote(TOPIC)] * 20))
    assert [type(one) for one in results] == [ServerUnavailable] * 20
    assert link.tries < 10, "not once more for each of them"


@pytest.mark.not_on_fakeredis("its error for a stream that is gone has a text of its own")
def test_a_pipeline_recreates_any_number_of_streams(bench: Bench) -> None:
    topics = [f"orders-{n}" for n in range(2 * MAX_REPAIRS)]
    for topic in topics:
        bench.call(Declare(topic, "lisa"))
        bench.store.ask("DEL", bench.store.keys.topic(topic).group("lisa").ready)
    results = bench.store.drive(
        bench.store.run_many([Pull(one, "lisa", "c1", 1) for one in topics])
    )
    assert [one for one in results if isinstance(one, LisaError)] == []


def test_prefixes_share_nothing(redis_url: str) -> None:
    one, two = store_on(redis_url), SyncStore(Connection(Address(redis_url)), Keys("other"))
    assert one.call(sends("a")[0]) == [Sent.ACCEPTED]
    two.call(Declare(TOPIC, "lisa"))
    assert two.drive(two.groups(TOPIC)) == ("lisa",)
    assert one.drive(one.groups(TOPIC)) == ()
    assert two.call(Promote(TOPIC)).moved == 0
    for store in (one, two):
        store.close()


@pytest.mark.parametrize(("schema", "shown"), [(2, "2"), (b"\xffv2", "'\ufffdv2'")])
def test_a_newer_schema_is_refused(bench: Bench, schema: Any, shown: str) -> None:
    for _ in range(2):
        bench.store.drive(bench.store.check_schema())
    bench.store.ask("SET", bench.store.keys.schema, schema)
    with pytest.raises(ConfigError, match=rf"has schema {shown} under .* supports up to 1"):
        bench.store.drive(bench.store.check_schema())


def test_a_send_and_a_delivery_survive_a_restart(own_server: EmbeddedServer) -> None:
    """The server returns in time, so no call fails."""
    store = store_on(own_server.url)
    store.call(Declare(TOPIC, "lisa"))
    assert store.call(sends("a")[0]) == [Sent.ACCEPTED]
    taken = store.call(Pull(TOPIC, "lisa", "c1", 1)).entries
    own_server.kill()
    own_server.restart()
    assert store.call(sends("a")[0]) == [Sent.ACCEPTED]
    assert store.drive(store.stats(TOPIC)) == {"sent": 1, "promoted": 1}
    opened = store.call(Open(TOPIC, "lisa", taken))
    assert opened.envelopes[0] is not None
    receipt = Settlement("a", taken[0].entry, "aaaaaaaa-", 1, 1)
    assert store.call(Ack(TOPIC, "lisa", [receipt])) == [Acked.ACKED]
    store.close()
