"""The reply to each script is lost in each role that calls it.

`test_lost_replies` tests how failures are reported; this module has both producers, all kinds of
handlers, a manager's upkeep, changes of shards and groups, the journal, and a clock step.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Consumer, Manager
from lisa.admin import groups, topics
from lisa.admin.fsck import check
from lisa.core.model.envelope import decode_envelope, encode_envelope, new_token
from lisa.core.model.keys import Keys
from lisa.core.model.sharding import Shard, Topic
from lisa.core.transitions import loader
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.read import Read
from lisa.core.transitions.restore import Restore, RestoreItem
from lisa.manager.pruner import Pruner
from lisa.producer import Outgoing
from tests.contract.bench import Bench
from tests.contract.samples import SAMPLES, comparable
from tests.producers import Either
from tests.roles import Cast, Services
from tests.servers import open_store, wait_until
from tests.shifted_server import ShiftedServer, missing
from tests.torture.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa.core.model.message import Message
    from lisa.embedded import EmbeddedServer

TOPIC = Topic("orders")
HOUR = timedelta(hours=1)
ONCE_AND_TWICE = pytest.mark.parametrize("times", [1, 2])


def body_of(envelope: bytes | None) -> int:
    return int(decode_envelope(envelope or b"").body)


class Lossy:
    """A server behind a proxy; `cast` connects directly, `store` through the proxy."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.cast = Cast(server.url, TOPIC, "lisa").declare(journal="1")
        self.proxy = Proxy(server.port, ("role",))
        self.url = self.proxy.url("role")
        self.store = open_store(self.url)
        for name in loader.names():  # else the lost reply may be that the script is missing
            self.cast.store.ask("SCRIPT", "LOAD", loader.load(name).source)

    def lose(self, *names: str, times: int = 1) -> None:
        shas = (loader.load(name).sha.encode() for name in names)
        self.proxy.lose_replies_to(*shas, times=times)

    def close(self) -> None:
        self.store.close()
        self.cast.store.close()
        self.proxy.close()

    def told(self, state: str) -> Counter[str]:
        """The number of journal entries of each id in a state."""
        found = self.cast.store.ask("XRANGE", self.cast.keys.events, "-", "+")
        events = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in found]
        return Counter(one[b"id"].decode() for one in events if one[b"state"].decode() == state)

    def is_sound(self) -> bool:
        return self.cast.store.drive(check(self.cast.store)).findings == []


@pytest.fixture
def lossy(valkey_server: EmbeddedServer, redis_url: str) -> Iterator[Lossy]:
    assert redis_url == valkey_server.url  # it is empty now
    made = Lossy(valkey_server)
    yield made
    made.close()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_call_of_any_script_survives_a_lost_reply(lossy: Lossy, name: str) -> None:
    """The state is that of a complete call; repeating the call does not change it."""
    sample, bench = SAMPLES[name], Bench(lossy.cast.store)
    lossy.cast.store.ask("FLUSHALL")
    bench.put(**sample.state)
    call = sample.make(bench, sample.ids)
    lossy.lose(name)
    answer = lossy.store.call(call)
    assert lossy.proxy.lost >= 1  # a script that reads the groups is called twice
    once = comparable(bench)
    assert once != {}
    again = bench.call(call)
    assert comparable(bench) == once
    if sample.repeats_its_answer:
        assert again == answer


@ONCE_AND_TWICE
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_producer_gets_the_same_reply_as_without_the_loss(
    lossy: Lossy, kind: str, times: int
) -> None:
    either = Either(kind, lossy.url)
    lossy.lose("enqueue", "cancel", "reschedule", "inspect", times=times)
    either.send(TOPIC, 1, id="a", delay=HOUR)
    report = either.send_many(TOPIC, [Outgoing(n, id=f"m{n}") for n in range(300)], delay=HOUR)
    assert {one.outcome for one in report} == {"accepted"}
    streamed = either.stream(TOPIC, [Outgoing(n, id=f"s{n}") for n in range(3)], 3)
    assert {one.outcome for one in streamed} == {"accepted"}
    assert either.send(TOPIC, 2, id="a", delay=HOUR, on_duplicate="replace") == "a"
    assert either.ask("cancel_many", TOPIC, ["m0", "m1", "none"])[:2] == ["cancelled"] * 2
    assert either.ask("cancel", TOPIC, "m2") == "cancelled"
    assert either.ask("reschedule", TOPIC, "a", delay=2 * HOUR) == "rescheduled"
    assert either.ask("fire_now", TOPIC, "m3") == "rescheduled"
    assert either.ask("get", TOPIC, "a").body == 2
    either.close()
    assert lossy.proxy.lost >= 8 * times
    assert lossy.told("sent") == Counter(["a", *(f"m{n}" for n in range(300)), "s0", "s1", "s2"])
    assert lossy.told("cancelled") == Counter(["m0", "m1", "m2"])
    assert lossy.told("replaced") == Counter(["a"])
    assert lossy.cast.stats()["sent"] == 304 + 1  # the replacement
    assert lossy.is_sound()


@ONCE_AND_TWICE
@pytest.mark.parametrize("kind", ["inline", "threads", "asyncio"])
def test_a_consumer_handles_each_message_once(lossy: Lossy, kind: str, times: int) -> None:
    lossy.cast.configure(ack_timeout="900")
    lossy.lose("open", "ack", "extend", "release", times=times)
    handled: list[tuple[str, int]] = []
    consumer = Consumer(lossy.url, concurrency=1 if kind == "inline" else 4)

    def handle(message: Message) -> None:
        handled.append((message.id, message.attempt))
        wait_until(lambda: message.body != "slow" or lossy.proxy.lost >= 3 * times)

    async def handle_async(message: Message) -> None:
        handled.append((message.id, message.attempt))

    consumer.on(TOPIC, handle_async if kind == "asyncio" else handle)
    sent = [lossy.cast.send(n or "slow") for n in range(30)]
    with consumer:
        wait_until(lambda: lossy.cast.stats().get("acked@lisa") == len(sent))
    assert sorted(handled) == sorted((one, 1) for one in sent)
    assert lossy.told("in_flight") == lossy.told("acked") == Counter(sent)
    assert lossy.is_sound()


@ONCE_AND_TWICE
def test_a_manager_s_upkeep_is_done_once(lossy: Lossy, times: int) -> None:
    cast, ask = lossy.cast, lossy.cast.store.ask
    lost = cast.send()
    due = [cast.send_due() for _ in range(3)]
    ask("XDEL", cast.own.ready, ask("HGET", cast.own.entries, lost))
    foreign = ask("XADD", cast.own.ready, "*", "what", "junk")
    assert cast.read(consumer="dead")
    ask("XACK", cast.own.ready, cast.group, foreign)
    ask("XGROUP", "CREATECONSUMER", cast.own.ready, cast.group, "gone")
    ask("HSET", cast.keys.consumers, "gone", '{"name":"gone","topic":"orders","group":"lisa"}')
    lossy.lose("promote", "trim", "mend", "forget", "declare", "configure", times=times)
    own = {"group": "lisa", "retention": timedelta(seconds=50)}
    with Manager(
        lossy.url,
        topics={TOPIC: own, "new": own},
        sweep="0/1 * * * * ?",
        clean="0/1 * * * * ?",
    ):
        wait_until(lambda: set(cast.states(due)) == {"ready"})
        wait_until(lambda: lossy.told("ready")[lost] == 2)  # it was repaired
        wait_until(lambda: ask("HEXISTS", Keys().topic("new").groups, "lisa"))
        wait_until(lambda: b"junk" not in repr(ask("XRANGE", cast.own.ready, "-", "+")).encode())
    assert lossy.told("ready") == Counter([*due, lost, lost])
    assert cast.stats()["promoted"] == len(due) + 1
    assert lossy.is_sound()


def test_a_journal_is_pruned_and_read(lossy: Lossy) -> None:
    cast = lossy.cast
    producer = Either("sync", cast.store.connection.address.url)
    sent = producer.send_many(TOPIC, range(300))
    producer.close()
    lossy.lose("prune", "read", times=2)
    bodies, start = list[Any](), "-"
    is_last = False
    while not is_last:
        is_last, items = lossy.store.call(Read(TOPIC, start, "+", most=100))
        for _, flat in items:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            if b"envelope" in fields:
                bodies.append(body_of(fields[b"envelope"]))
        start = f"({items[-1][0].decode()}" if items else start
    assert bodies == list(range(len(sent)))
    cast.configure(journal_max="10")
    Pruner(lossy.store).step(Shard(TOPIC))
    assert cast.store.ask("XLEN", cast.keys.events) < 200  # whole nodes of its tree
    assert lossy.proxy.lost >= 2 * 5


@ONCE_AND_TWICE
def test_a_group_is_declared_and_removed(lossy: Lossy, times: int) -> None:
    lossy.lose("declare", "undeclare", "configure", times=times)
    store = lossy.store
    store.drive(groups.add(store, TOPIC, "other"))
    sent = [lossy.cast.send() for _ in range(5)]
    for one in lossy.cast.take():
        lossy.cast.ack(one)
    assert store.drive(groups.remove(store, TOPIC, "other")) == len(sent)
    assert store.drive(store.groups(TOPIC)) == ("lisa",)
    assert set(lossy.cast.states(sent)) <= {"acked", "purged"}
    assert lossy.proxy.lost >= 2 * times
    assert lossy.is_sound()


@ONCE_AND_TWICE
def test_shards_change_and_the_old_ones_are_deleted(lossy: Lossy, times: int) -> None:
    cast, store = lossy.cast, lossy.store
    cast.configure(journal="0", retention="0")
    lossy.lose("set_layout", "configure", "absorb", "clear", "declare", times=times)
    producer = Either("sync", lossy.url)
    for shards in (3, 1):
        store.drive(topics.set_options(store, TOPIC, {"shards": shards}))
        assert len(producer.send_many(TOPIC, range(20), delay=HOUR)) == 20
        waiting = [one.id for one in producer.send_many(TOPIC, range(20), delay=HOUR)]
        producer.ask("cancel_many", TOPIC, waiting)
    producer.close()
    consumer = Consumer(lossy.url, concurrency=2)
    handled: list[str] = []
    consumer.on(TOPIC, lambda message: handled.append(message.id))
    for shard in store.drive(store.layout(TOPIC)).counted(TOPIC):
        keys = store.keys.topic(shard)
        for one in cast.store.ask("ZRANGE", keys.waiting, 0, -1):
            cast.store.ask("ZADD", keys.waiting, 1, one)
    with Manager(lossy.url, topics={TOPIC: {"retention": 0}}, sweep="0/1 * * * * ?"), consumer:
        wait_until(lambda: len(handled) >= 40)
        wait_until(lambda: not cast.store.drive(cast.store.layout(TOPIC)).older)
        wait_until(lambda: not _of_shards(cast))
    assert len(handled) == len(set(handled)) == 40
    assert lossy.proxy.lost >= 5 * times
    assert lossy.is_sound()


def _of_shards(cast: Cast) -> list[str]:
    names = [key.decode() for key in cast.store.ask("KEYS", f"lisa:{{{TOPIC}~*")]
    return [one for one in names if "}:reply:" not in one and "}:done:" not in one]


@ONCE_AND_TWICE
def test_an_operator_s_reads_and_a_restore_are_answered(lossy: Lossy, times: int) -> None:
    token = new_token()
    items = [RestoreItem(f"r{n}", encode_envelope(token, n), 10**13) for n in range(20)]
    lossy.store.drive(lossy.store.register([TOPIC]))
    lossy.lose("restore", "inspect", times=times)
    assert lossy.store.call_by_id(Restore(TOPIC, items)) == ["restored"] * len(items)
    seen = lossy.store.call_by_id(Inspect(TOPIC, [one.id for one in items]))
    assert [body_of(one.envelope) for one in seen] == list(range(20))
    assert lossy.proxy.lost == 2 * times
    assert lossy.is_sound()


@ONCE_AND_TWICE
@pytest.mark.parametrize("by", [HOUR, -HOUR], ids=["forward", "back"])
def test_leases_are_renewed_once(tmp_path: Path, by: timedelta, times: int) -> None:
    if reason := missing():
        pytest.skip(reason)
    with ShiftedServer(tmp_path / "server") as server:
        lossy = Lossy(server)
        cast = lossy.cast
        cast.configure(ack_timeout="2000", retry_delays="3600000")
        through = Cast(lossy.url, TOPIC, "lisa")
        kit = Services(through)
        sent = [cast.send() for _ in range(3)]
        cast.store.call(Pull(TOPIC, "lisa", "dead", 2))
        cast.store.call(Pull(TOPIC, "lisa", "dead", 1, 4_000))
        before = float(cast.store.ask("ZSCORE", cast.own.leases, sent[2]))
        lossy.lose("renew", times=times)
        server.step(by)
        kit.clock.sample(through.store)
        kit.reclaimer.step([TOPIC])
        assert cast.states(sent) == ["in_flight"] * 3
        moved_ms = float(cast.store.ask("ZSCORE", cast.own.leases, sent[2])) - before
        assert moved_ms == pytest.approx(by.total_seconds() * 1e3, abs=200)
        assert lossy.proxy.lost == times
        pending = cast.store.ask("XPENDING", cast.own.ready, "lisa", "-", "+", 9)
        assert max(one[2] for one in pending) < 2_000
        through.store.close()
        lossy.close()
