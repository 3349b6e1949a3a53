"""retry: in flight -> retry, or garbage after the last attempt."""

from typing import Any

import pytest

from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.retry import Fail, Failed, Failure, Retried
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, G, Row

D = 1_000
HELD = Row("a", D, 1, "c1")


def fail(bench: Bench, **options: Any) -> Retried:
    failure = Failure(*bench.receipt("a"), "boom", **options)
    (said,) = bench.call(Fail(TOPIC, "lisa", [failure]))
    return said


def retried(due: Any) -> G:
    """A group after the first failure of message a."""
    return G(retry={"a": due}, attempts={"a": 1}, reasons={"a": "boom"})


def test_the_default_pause_is_twenty_seconds(bench: Bench) -> None:
    bench.put(body="a", expiry={"a": FAR}, lisa=G(ready=[HELD], leases={"a": FAR}))
    said = fail(bench, lateness="e")
    assert said == Retried(Failed.RETRYING, said.due_ms, 1)
    stats = {"retried@lisa": 1, "late:e@lisa": 1}
    bench.check_change(stats=stats, lisa=retried(bench.now + 20_000))
    assert bench.state()["lisa:retry"]["a"] == said.due_ms


POLICIES = [
    # options, own policy, failed before, pause or None for garbage
    ({}, None, 9, 20_000),
    ({}, None, 10, None),
    ({"retry_delays": "0,5000"}, None, 0, 0),
    ({"retry_delays": "0,5000"}, None, 1, 5000),
    ({"retry_delays": "0,5000"}, None, 2, None),
    ({"retry_delays": ""}, None, 0, None),
    ({"retry_delays": "0,5000"}, "7000", 0, 7000),
    ({"retry_delays": "0,5000"}, "7000", 1, None),
    ({"retry_delays": "0,5000"}, "", 0, None),
    ({"retry_delays": "~0.5"}, None, 0, None),
]


@pytest.mark.parametrize(("options", "own", "failed", "pause"), POLICIES)
def test_the_policy_determines_the_next_attempt(
    bench: Bench, options: dict[str, str], own: str | None, failed: int, pause: int | None
) -> None:
    policy = {} if own is None else {"a": own}
    held = G(ready=[Row("a", D, failed + 1, "c1")], attempts={"a": failed} if failed else {})
    bench.put(options=options, policy=policy, body="a", lisa=held)
    said = fail(bench)
    assert said.outcome is (Failed.DEAD if pause is None else Failed.RETRYING)
    assert said.failed_attempts == failed + 1
    place: dict[str, Any] = (
        {"garbage": {"a": bench.now}} if pause is None else {"retry": {"a": bench.now + pause}}
    )
    bench.check_change(
        stats={"garbage@lisa" if pause is None else "retried@lisa": 1},
        lisa=G(**place, attempts={"a": failed + 1}, reasons={"a": "boom"}),
    )


@pytest.mark.parametrize(
    ("policy", "delay", "pause"), [({}, 0, 0), ({}, 7, 7), ({"a": ""}, 5, None)]
)
def test_a_handlers_delay_overrides_the_policys_and_adds_no_attempt(
    bench: Bench, policy: dict[str, str], delay: int, pause: int | None
) -> None:
    bench.put(policy=policy, body="a", lisa=G(ready=[HELD]))
    said = fail(bench, delay=delay)
    assert said.outcome is (Failed.DEAD if pause is None else Failed.RETRYING)
    assert said.due_ms == (None if pause is None else bench.now + pause)


def test_jitter_only_lengthens_and_differs(bench: Bench) -> None:
    ids = [f"m{i}" for i in range(30)]
    held = G(ready=[Row(m, D, 1, "c1") for m in ids])
    bench.put(options={"retry_delays": "1000~0.5"}, body=ids, lisa=held)
    failures = [Failure(*bench.receipt(m), "boom") for m in ids]
    before = bench.clock()
    said = bench.call(Fail(TOPIC, "lisa", failures))
    pauses = [one.due_ms - before for one in said if one.due_ms is not None]
    assert len(pauses) == 30
    assert min(pauses) >= 1000
    assert max(pauses) <= 1500 + bench.clock() - before + 1
    assert len(set(pauses)) > 10


def test_a_tiny_jitter_lengthens_pauses_by_little(bench: Bench) -> None:
    policy = RetryPolicy((100_000,), jitter=0.00001).encode()
    bench.put(options={"retry_delays": policy}, body="a", lisa=G(ready=[HELD]))
    said = fail(bench)
    assert said.due_ms is not None
    assert said.due_ms <= bench.clock() + 100_002


@pytest.mark.parametrize("delay", [None, 7])
def test_no_pause_is_shorter_than_asked_for(bench: Bench, delay: int | None) -> None:
    ids = [f"m{i}" for i in range(400)]
    telling = 0
    held = G(ready=[Row(m, D, 1, "c1") for m in ids])
    bench.put(options={"retry_delays": "7"}, body=ids, lisa=held)
    for m in ids:  # one call each, as all dues of one call count from the same instant
        failure = Failure(*bench.receipt(m), "boom", delay)
        seconds, micros = bench.store.ask("TIME")
        (said,) = bench.call(Fail(TOPIC, "lisa", [failure]))
        assert said.due_ms is not None
        before_us = int(seconds) * 1_000_000 + int(micros)
        assert said.due_ms * 1_000 >= before_us + 7_000
        # Only calls within a millisecond would show a clock rounded down.
        telling += said.due_ms - 7 <= before_us // 1_000 + 1
        if telling == 40:
            break


def test_discard_moves_to_garbage_and_ends_the_ttl(bench: Bench) -> None:
    bench.put(body="a", expiry={"a": FAR}, lisa=G(ready=[HELD]))
    assert fail(bench, delay="discard") == Retried(Failed.DEAD, None, 1)
    dead = G(garbage={"a": bench.now}, attempts={"a": 1}, reasons={"a": "boom"})
    bench.check_change(expiry=None, stats={"garbage@lisa": 1}, lisa=dead)


def test_a_failure_in_one_group_does_not_affect_others(bench: Bench) -> None:
    held = G(ready=[HELD])
    bench.put(body="a", policy={"a": ""}, expiry={"a": FAR}, lisa=held, audit=held)
    assert fail(bench).outcome is Failed.DEAD
    dead = G(garbage={"a": bench.now}, attempts={"a": 1}, reasons={"a": "boom"})
    bench.check_change(stats={"garbage@lisa": 1}, lisa=dead)


def test_the_same_receipt_twice_in_one_call_fails_once(bench: Bench) -> None:
    bench.put(body="a", options={"retry_delays": "5000"}, lisa=G(ready=[HELD]))
    failure = Failure(*bench.receipt("a"), "boom")
    said = bench.call(Fail(TOPIC, "lisa", [failure, failure]))
    assert [one.outcome for one in said] == [Failed.RETRYING, Failed.STALE]
    stats = {"retried@lisa": 1, "stale@lisa": 1}
    bench.check_change(stats=stats, lisa=retried(bench.now + 5000))


REASON = "x " * 512


@pytest.mark.parametrize("traceback", ["boom at line ü", "t" * 5000])
def test_garbage_keeps_the_traceback(bench: Bench, traceback: str) -> None:
    """Of a reason a KiB is kept, of a traceback two; the journal has no traceback."""
    bench.put(body="a", options={"journal": "1"}, lisa=G(ready=[HELD]))
    failure = Failure(*bench.receipt("a"), "x\0" * 1024, "discard", traceback=traceback)
    bench.call(Fail(TOPIC, "lisa", [failure]))
    (seen,) = bench.call(Inspect(TOPIC, ["a"]))
    (held,) = seen.group_states
    assert (held.state, held.reason, held.traceback) == ("garbage", REASON, traceback[:2048])
    (event,) = bench.store.ask("XRANGE", bench.keys.events, "-", "+")
    assert REASON.encode() in event[1]
    assert traceback[:4].encode() not in b"".join(event[1])


def test_a_retry_keeps_no_traceback(bench: Bench) -> None:
    bench.put(body="a", lisa=G(ready=[HELD]))
    failure = Failure(*bench.receipt("a"), "x\0" * 1024, traceback="boom at line 3")
    bench.call(Fail(TOPIC, "lisa", [failure]))
    assert bench.state()["lisa:reasons"] == {"a": REASON}


def test_without_its_record_a_repeated_failure_is_recognised(bench: Bench) -> None:
    """The record is kept for a while."""
    held = [Row("a", D, 2, "c1"), Row("b", D, 1, "c1")]
    bench.put(body="ab", lisa=G(ready=held, attempts={"a": 1}))
    failures = [
        Failure(*bench.receipt("a"), "boom", 7_000, attempt=2),
        Failure(*bench.receipt("b"), "bang", "discard", attempt=1, traceback="at line 3"),
    ]
    call = Fail(TOPIC, "lisa", failures)
    first = bench.call(call)
    assert [one.outcome for one in first] == [Failed.RETRYING, Failed.DEAD]
    record = bench.keys.reply(call.call_id)
    assert 50_000 < bench.store.ask("PTTL", record) <= call.kept_ms
    assert bench.store.ask("DEL", record) == 1
    after = bench.state()
    assert bench.call(call) == first
    assert bench.state() == after


@pytest.mark.parametrize("other", [{"attempt": 2}, {"reason": "bang"}, {}])
def test_a_different_failure_is_not_mistaken_for_a_repeat(
    bench: Bench, other: dict[str, Any]
) -> None:
    bench.put(body="a", lisa=G(garbage={"a": D}, attempts={"a": 1}, reasons={"a": "boom"}))
    failure = Failure("a", "1-1", **{"reason": "boom", **other})
    assert bench.call(Fail(TOPIC, "lisa", [failure])) == [Retried(Failed.STALE, None, 0)]
