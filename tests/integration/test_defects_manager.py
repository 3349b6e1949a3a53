"""Known defects of the original's manager, by number; Lisa has none of them.

L3 a trimmed pending entry stopped reclaiming permanently; L4 so did an entry of another form;
L5 one topic's error stopped all later topics; L6 trimming by length dropped unread entries;
L9 a retry was counted from the old due time; L10 calls were limited and not repeated; L11 a second
group was never created, a first one began at its own start; L15 garbage and bodies were never
deleted; L19 errors were not logged; L20 one slow job blocked all others.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa.manager import Manager
from lisa.manager.expirer import Expirer
from lisa.manager.promoter import Promoter
from lisa.manager.reclaimer import Reclaimer
from lisa.manager.server_clock import ServerClock
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.sweeper import Sweeper
from lisa.manager.trimmer import Trimmer
from tests.roles import Cast
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

    from lisa.core.model.stream import Entry

ORIGINAL_COUNT = 20
ORIGINAL_MOVING_SIZE = 100


@pytest.fixture
def cast(server: str) -> Iterator[Cast]:
    cast = Cast(server).declare(ack_timeout="50", retry_delays="20000")
    yield cast
    cast.store.close()


@pytest.fixture
def reclaimer(cast: Cast) -> Reclaimer:
    return Reclaimer(cast.store, ServerClock(), SignalQueue(cast.store), ORIGINAL_COUNT)


@pytest.fixture
def promoter(cast: Cast) -> Promoter:
    expirer = Expirer(cast.store, SignalQueue(cast.store))
    return Promoter(cast.store, ServerClock(), expirer, lambda _: ORIGINAL_MOVING_SIZE)


def test_l3_a_pending_entry_that_was_trimmed_stops_nothing(
    cast: Cast, raw: redis.Redis, reclaimer: Reclaimer
) -> None:
    lost, behind = cast.send(), cast.send()
    entries = {entry.id: entry.entry for entry in cast.take()}
    raw.xdel(cast.own.ready, entries[lost])  # pending at the head of the list, and deleted
    time.sleep(0.06)
    reclaimer.step(["orders"])
    assert cast.state(behind) == "retry"
    assert cast.store.ask("XPENDING", cast.own.ready, "g")[0] == 0
    Trimmer(cast.store).step("orders")
    assert cast.state(lost) == "retry"  # and the message of the trimmed entry is not lost


def test_l4_a_pending_entry_of_another_form_stops_nothing(
    cast: Cast, raw: redis.Redis, reclaimer: Reclaimer
) -> None:
    raw.xadd(cast.own.ready, {"name": '{"body":"init message...remember lisa"}'})
    behind = cast.send()
    cast.read()
    time.sleep(0.06)
    reclaimer.step(["orders"])
    assert cast.state(behind) == "retry"
    assert cast.store.ask("XPENDING", cast.own.ready, "g")[0] == 0
    assert cast.store.ask("XLEN", cast.own.ready) == 0
    assert cast.stats()["cleared@g"] == 1


def test_l5_one_topics_error_stops_no_topic_after_it(
    server: str, cast: Cast, raw: redis.Redis
) -> None:
    broken, after = cast.on("aaa").declare(), cast.on("zzz").declare(ack_timeout="100")
    for key in (broken.keys.waiting, broken.own.ready, broken.keys.expiry):
        raw.delete(key)
        raw.set(key, "of the wrong type")
    quick = timedelta(milliseconds=200)
    late = after.send(delay_ms=100)
    topics = {"aaa": {}, "zzz": {"garbage_keep": "1ms"}}
    with Manager(
        server, topics=topics, move=quick, clean=quick, process_pending=quick, sweep=quick
    ):
        wait_until(after.take)  # promoted
        wait_until(lambda: after.state(late) == "retry")  # reclaimed
        dead = after.send()
        (entry,) = after.await_entries()
        after.discard(entry)
        wait_until(lambda: after.state(dead) == "purged")  # swept


def test_l6_trimming_never_drops_unread_entries(cast: Cast, promoter: Promoter) -> None:
    cast.configure(max_ready="10", ack_timeout="60000")
    sent = {cast.send_due() for _ in range(30)}
    got: set[str] = set()
    for _ in range(3):
        promoter.step(["orders"])
        Trimmer(cast.store).step("orders")
        got |= {entry.id for entry in cast.take()}
        Trimmer(cast.store).step("orders")  # pending entries stay as well
    assert got == sent
    assert {cast.state(one) for one in sent} == {"in_flight"}


def test_l9_a_retry_is_counted_from_now(cast: Cast, reclaimer: Reclaimer) -> None:
    sent = cast.send()
    time.sleep(0.2)  # consumed late
    cast.take()
    time.sleep(0.06)
    before_ms = cast.now_ms()
    reclaimer.step(["orders"])
    (state,) = cast.look(sent).group_states
    assert state.due_ms is not None
    assert before_ms + 20_000 <= state.due_ms <= cast.now_ms() + 20_001  # rounded up


def test_l10_one_run_reclaims_and_promotes_all(
    server: str, cast: Cast, reclaimer: Reclaimer
) -> None:
    cast.configure(ack_timeout="300", retry_delays="0")
    sent = [cast.send() for _ in range(5 * ORIGINAL_COUNT)]
    cast.take(1_000)
    time.sleep(0.31)
    reclaimer.step(["orders"])
    assert cast.store.ask("ZCARD", cast.own.retry) == len(sent)
    waiting = [cast.send(delay_ms=50) for _ in range(5 * ORIGINAL_MOVING_SIZE)]
    # A day between two ticks: all messages are moved by consecutive calls.
    with Manager(server, topics=["orders"], move=timedelta(days=1)):
        wait_until(
            lambda: cast.store.ask("XLEN", cast.own.ready) == len(sent) + len(waiting),
        )


def test_l11_every_group_is_made_and_begins_with_the_first_message(
    server: str, cast: Cast, promoter: Promoter
) -> None:
    early = cast.on("early", "first")
    sent = early.send(delay_ms=20)  # before any manager, any group, any consumer
    time.sleep(0.05)
    with Manager(server, topics={"early": {"groups": ["first", "second"]}}):
        got: list[Entry] = []
        for one in (early, early.on("early", "second")):
            wait_until(lambda one=one: cast.store.ask("EXISTS", one.own.ready))  # type: ignore[misc]
            got += one.await_entries()
    assert [entry.id for entry in got] == [sent, sent]


def test_l15_garbage_is_purged_after_its_time_and_leaves_nothing(
    cast: Cast, raw: redis.Redis
) -> None:
    cast.configure(garbage_keep="60000", retry_delays="", retention="0")
    sent = cast.send({"n": 1}, ttl_ms=60_000, policy="")
    cast.discard(cast.take()[0])
    assert cast.state(sent) == "garbage"
    sweeper = Sweeper(cast.store, Expirer(cast.store, SignalQueue(cast.store)), lambda _: True)
    sweeper.step("orders")
    assert cast.state(sent) == "garbage"
    cast.configure(garbage_keep="1")
    time.sleep(0.01)
    sweeper.step("orders")
    left = {bytes(key).decode().removeprefix(cast.keys.root) for key in raw.scan_iter()}
    assert {key for key in left if not key.startswith(("lisa:", "reply:"))} == {
        "options",
        "groups",
        "stats",
        "g:g:ready",
    }


def test_l19_every_error_is_logged(
    server: str, cast: Cast, raw: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    raw.set(cast.keys.waiting, "of the wrong type")
    with Manager(server, topics=["orders"]):
        wait_until(lambda: "promoter: topic orders: " in caplog.text)
    told = [one for one in caplog.messages if one.startswith("promoter: topic orders")]
    assert len(told) == 1  # once, not at each attempt
    assert "WRONGTYPE" in told[0]


@pytest.mark.parametrize("key", ["waiting", "retry"])
def test_a_key_that_breaks_while_a_topic_is_idle_is_reported(
    server: str, cast: Cast, raw: redis.Redis, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    caplog.set_level(logging.INFO, "lisa.manager")
    broken = {"waiting": cast.keys.waiting, "retry": cast.own.retry}[key]
    with Manager(server, topics=["orders"], move=timedelta(milliseconds=200)) as manager:
        wait_until(lambda: manager.health()["status"] == "ok")
        raw.set(broken, "of the wrong type")
        wait_until(lambda: "promoter: topic orders: " in caplog.text)
        raw.delete(broken)
        wait_until(lambda: "promoter: topic orders works again" in caplog.text)
    told = [one for one in caplog.messages if one.startswith("promoter: topic orders: ")]
    assert len(told) == 1
    assert "WRONGTYPE" in told[0]


def test_l20_a_slow_job_does_not_block_others(
    server: str, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def dawdle(_service: Trimmer, topic: str) -> None:
        entered.set()
        leave.wait(20)

    monkeypatch.setattr(Trimmer, "pick", lambda _service, topics: topics)
    monkeypatch.setattr(Trimmer, "step", dawdle)
    cast.configure(ack_timeout="300", retry_delays="100")
    with Manager(server, topics=["orders"], clean=timedelta(milliseconds=100)):
        try:
            assert entered.wait(10)
            sent = cast.send(delay_ms=100)
            assert [entry.id for entry in cast.await_entries()] == [sent]
            assert [entry.attempt for entry in cast.await_entries()] == [2]  # reclaimed
        finally:
            leave.set()
