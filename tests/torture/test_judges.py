"""The judges of a single rule: each can be provoked, similar but innocent cases are acquitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.torture.papers import HANDLER, accused, us
from tests.torture.world import Do, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torture.papers import Papers


def unconfirmed(papers: Papers, error: str = "ServerUnavailable", role: str = "producer-1") -> None:
    """A send that ends in an error."""
    papers.events[0]["role"] = role
    papers.send(at_s=20.0, confirmed=False)
    papers.events.pop()  # the fault that would excuse it
    papers.sent[-1] = papers.sent[-1].replace("ServerUnavailable", error)


# Failed calls


def test_a_call_that_fails_without_a_fault(papers: Papers) -> None:
    unconfirmed(papers)
    assert accused(papers) == {"unexplained": 1}


@pytest.mark.parametrize("error", ["TopicFull", "InvalidMessage", "LisaError", "KeyError", "error"])
def test_an_error_without_a_fault(papers: Papers, error: str) -> None:
    unconfirmed(papers, error)
    papers.fault("server-kill", "server", 19.0, 24.0)
    assert accused(papers) == {"unexplained": 1}


@pytest.mark.parametrize(
    ("error", "guilty"),
    [
        ("Unanswered", {}),
        ("Unanswered 503", {}),
        ("Unanswered 400", {"unexplained": 1}),
        ("Unanswered 500", {"unexplained": 1}),
    ],
)
def test_the_http_status_decides_whose_fault_it_is(
    papers: Papers, error: str, guilty: dict[str, int]
) -> None:
    unconfirmed(papers, error, "producer-http")
    papers.kill(9, 19.0, "gateway-1")
    assert accused(papers) == guilty


@pytest.mark.parametrize(
    ("rolled", "guilty"),
    [
        (["manager-1", "gateway-1"], {}),
        (["manager-1"], {"unexplained": 1}),
    ],
)
def test_a_gateway_that_is_rolled_to_another_build_is_away_for_a_while(
    papers: Papers, rolled: list[str], guilty: dict[str, int]
) -> None:
    unconfirmed(papers, "Unanswered", "producer-http")
    papers.fault("roll", "server", 19.0, 24.0, rolled=rolled)
    assert accused(papers) == guilty


def server_away(papers: Papers) -> None:
    papers.fault("server-stop", "server", 19.0, 21.0)


def at_its_door(papers: Papers) -> None:
    papers.fault("refuse", "producer", 19.0, 21.0)


def at_every_door(papers: Papers) -> None:
    papers.fault("hang", "*", 18.0, 19.5)


def stopped_itself(papers: Papers) -> None:
    papers.fault("freeze-producer", "producer-1", 19.0, 25.0, numbers=[1])


def stood_still(papers: Papers) -> None:
    papers.stalls[2] = [f"{us(21.0)}\t{us(23.0)}"]


@pytest.mark.parametrize(
    "story", [server_away, at_its_door, at_every_door, stopped_itself, stood_still]
)
@pytest.mark.parametrize("error", ["ServerUnavailable", "NotReplicated", "Misplaced"])
def test_a_call_may_fail(papers: Papers, story: Callable[[Papers], None], error: str) -> None:
    unconfirmed(papers, error)
    story(papers)
    assert accused(papers) == {}


def at_another_door(papers: Papers) -> None:
    papers.fault("refuse", "consumer", 19.0, 21.0)


def of_another_process(papers: Papers) -> None:
    papers.fault("freeze-producer", "producer-2", 19.0, 25.0, numbers=[7])


def long_before(papers: Papers) -> None:
    papers.fault("server-stop", "server", 8.0, 10.0)


def not_done(papers: Papers) -> None:
    papers.fault("server-stop", "server", 19.0, 21.0, skipped="it does not run")


@pytest.mark.parametrize("story", [at_another_door, of_another_process, long_before, not_done])
def test_a_call_may_not_fail(papers: Papers, story: Callable[[Papers], None]) -> None:
    unconfirmed(papers)
    story(papers)
    assert accused(papers) == {"unexplained": 1}


# Late


def test_late_without_a_fault(papers: Papers) -> None:
    papers.handle(papers.send(), 4.1)
    papers.handle(papers.send(), 3.9)
    assert accused(papers) == {"late": 1}


@pytest.mark.parametrize("story", [server_away, at_another_door, stood_still])
def test_late_because_of_a_fault(papers: Papers, story: Callable[[Papers], None]) -> None:
    papers.handle(papers.send(due="+20000"), 29.0)
    story(papers)
    assert accused(papers) == {}


def test_late_in_a_later_attempt_is_not_judged(papers: Papers) -> None:
    number = papers.send("hard", do=Do.RAISE)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.FAILED)
    papers.handle(number, 8.0, topic="hard", attempt=2, due_s=1.4)
    assert accused(papers) == {}


def test_late_because_its_due_time_was_set_wrong(papers: Papers) -> None:
    papers.handle(papers.send(), 5.0, due_s=5.0)
    assert accused(papers) == {"late": 1}


def test_put_off_is_late_by_its_new_due_time(papers: Papers) -> None:
    in_time, late = papers.send(), papers.send()
    for number in (in_time, late):
        papers.move(number, 0.5, "+9000")
    papers.handle(in_time, 9.6)
    papers.handle(late, 12.6)
    assert accused(papers) == {"late": 1}


def test_brought_forward_and_still_handled_when_it_was_due_before(papers: Papers) -> None:
    number = papers.send(due="+9000")
    papers.move(number, 0.5, "+0")
    papers.handle(number, 9.1, due_s=9.0)
    assert accused(papers) == {"late": 1}


@pytest.mark.parametrize("answer", ["i", None])
def test_possibly_brought_forward_is_not_late(papers: Papers, answer: str | None) -> None:
    number = papers.send(due="+9000")
    papers.move(number, 0.5, "+0", answer)
    papers.handle(number, 9.1)
    assert accused(papers) == {}


def test_a_repaired_message_may_be_due_at_its_repair(papers: Papers) -> None:
    number = papers.send()
    papers.fault("trim", "fickle/lisa", 1.0, 3.0, messages=[number], repaired={"entry-lost": 1})
    papers.handle(number, 3.1, due_s=3.0)
    assert accused(papers) == {}


@pytest.mark.parametrize("confirmed", [False, True])
def test_messages_restored_from_an_archive_may_be_late(papers: Papers, *, confirmed: bool) -> None:
    number = papers.send("bulk", at_s=5.0, due="+20000", confirmed=confirmed)
    papers.loss(4.0, 8.0)
    papers.handle(number, 40.0, topic="bulk")
    assert accused(papers) == {}


def test_past_its_ttl(papers: Papers) -> None:
    papers.handle(papers.send(ttl_ms=500), 2.4)
    papers.handle(papers.send(ttl_ms=500), 2.6)
    assert accused(papers) == {"late": 1}


def test_past_its_ttl_after_its_handler_was_frozen(papers: Papers) -> None:
    papers.handle(papers.send(ttl_ms=500), 2.6)
    papers.fault("freeze-consumer", "consumer-1", 1.1, 2.5, numbers=[2])
    assert accused(papers) == {}


# After a replacement


def test_handled_after_it_was_replaced(papers: Papers) -> None:
    old = papers.send()
    papers.handle(papers.replace(old, 0.5, "+1000"), 1.6)
    papers.handle(old, 3.0)
    assert accused(papers) == {"after replace": 1}


def test_begun_although_replaced_while_a_consumer_held_it(papers: Papers) -> None:
    old = papers.send()
    papers.handle(papers.replace(old, 1.05, "+1000"), 2.1)
    papers.handle(old, 1.2)
    assert accused(papers) == {}


def test_a_replacement_that_the_server_lost_is_excused(papers: Papers) -> None:
    old = papers.send()
    papers.replace(old, 0.5, "+1000")
    papers.loss(0.3, 0.8)
    papers.handle(old, 3.0)
    assert accused(papers) == {}
    assert set(papers.verdicts_again().excused) == {"after replace", "lost"}


@pytest.mark.parametrize("is_handled", [False, True])
def test_a_failed_replacement_proves_nothing(papers: Papers, *, is_handled: bool) -> None:
    old = papers.send()
    papers.replace(old, 0.5, "+1000", answer=None)
    if is_handled:
        papers.handle(old, 5.0, due_s=1.0)
    assert accused(papers) == {}


# Answers


def test_a_confirmed_cancel_after_handling(papers: Papers) -> None:
    number = papers.send()
    papers.handle(number, 1.1)
    papers.cancel(number, 1.2)
    assert accused(papers) == {"unexplained": 1}


@pytest.mark.parametrize("answer", ["d", "i"])
def test_a_late_cancel_may_report_so(papers: Papers, answer: str) -> None:
    number = papers.send()
    papers.handle(number, 1.1)
    papers.cancel(number, 1.2, answer)
    assert accused(papers) == {}


def test_a_cancel_after_handling_with_a_lost_lease(papers: Papers) -> None:
    number = papers.send()
    papers.handle(number, 1.1, took_s=6.0)
    papers.fault("freeze-consumer", "consumer-1", 1.2, 6.5, numbers=[2])
    papers.cancel(number, 7.2)
    assert accused(papers) == {}


def test_a_duplicate_does_not_change_the_due_time(papers: Papers) -> None:
    number = papers.send(due="+3000")
    papers.again(number, 0.1, "+1000")
    papers.handle(number, 1.2)
    assert accused(papers) == {"early": 1}


def test_accepted_twice(papers: Papers) -> None:
    number = papers.send(due="+3000")
    papers.again(number, 0.1, "+3000", "a")
    papers.handle(number, 3.2)
    assert accused(papers) == {"unexplained": 1}


@pytest.mark.parametrize("is_lost", [False, True])
def test_accepted_again_after_a_loss(papers: Papers, *, is_lost: bool) -> None:
    number = papers.send(due="+3000")
    if is_lost:
        papers.loss(0.0, 0.5)
    else:
        papers.fault("delete-bodies", "fickle", 0.2, 0.5, messages=[number], deleted=True)
    papers.again(number, 0.6, "+1000", "a")
    papers.handle(number, 1.7, due_s=1.6)
    assert accused(papers) == {}


def test_replaced_and_yet_accepted_as_new(papers: Papers) -> None:
    papers.handle(papers.replace(papers.send(), 0.5, "+1000", "a"), 1.6)
    assert accused(papers) == {"unexplained": 1}


def test_a_new_id_that_is_known(papers: Papers) -> None:
    papers.send()
    papers.sent[-1] = papers.sent[-1][:-1] + "d"
    papers.handle(1 << 32, 1.1)
    assert accused(papers) == {"unexplained": 1}


# Attempts


def failed_before(papers: Papers, attempt: int, at_s: float) -> None:
    number = papers.send("hard", do=Do.RAISE)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.FAILED)
    papers.handle(number, at_s, topic="hard", attempt=attempt, due_s=1.0)


@pytest.mark.parametrize(
    ("attempt", "at_s", "guilty"),
    [
        (2, 1.4, {}),
        (2, 1.2, {"unexplained": 1}),
        (1, 1.4, {"unexplained": 1}),
        (3, 1.4, {"unexplained": 1}),
    ],
)
def test_the_next_attempt_follows_the_pause(
    papers: Papers, attempt: int, at_s: float, guilty: dict[str, int]
) -> None:
    failed_before(papers, attempt, at_s)
    assert accused(papers) == guilty


def test_a_fault_affected_the_next_attempt(papers: Papers) -> None:
    failed_before(papers, 1, 1.15)
    papers.fault("destroy-group", "hard/lisa", 1.101, 1.102, places=[16], redelivers=True)
    assert accused(papers) == {}


def test_handled_in_another_topic(papers: Papers) -> None:
    papers.handle(papers.send(), 1.1)
    papers.handle(papers.send(), 1.1, topic="async")
    assert accused(papers) == {"unexplained": 1}


@pytest.mark.parametrize(
    ("do", "times", "guilty"),
    [
        (Do.POISON, 3, {}),
        (Do.POISON, 2, {"unexplained": 1}),
        (Do.DISCARD, 0, {"unexplained": 1}),
    ],
)
def test_garbage_is_deserved(papers: Papers, do: Do, times: int, guilty: dict[str, int]) -> None:
    number = papers.send("hard", do=do)
    for n in range(times):
        papers.handle(number, 1.1 + n, topic="hard", verdict=Verdict.FAILED, attempt=n + 1)
    papers.stay(number, "garbage", "hard")
    assert accused(papers) == guilty


def test_attempts_that_a_fault_used_up(papers: Papers) -> None:
    number = papers.send("hard", do=Do.POISON)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.FAILED, attempt=2)
    papers.stay(number, "garbage", "hard")
    papers.kill(2, 1.05)
    assert accused(papers) == {}


# Repairs during the run


def foreign(papers: Papers, kind: str, repaired: dict[str, int], at_s: float = 5.0) -> None:
    papers.fault(kind, "fickle/lisa", at_s, at_s + 1, repaired=repaired)


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("trim", "entry-lost"),
        ("trim", "pending-lost"),
        ("delete-bodies", "no-body"),
        ("delete-consumer", "entry-lost"),
        ("destroy-group", "no-stream"),
    ],
)
def test_an_operator_finds_foreign_damage(papers: Papers, kind: str, left: str) -> None:
    foreign(papers, kind, {left: 3})
    assert accused(papers) == {}


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("trim", "no-body"),
        ("trim", "second-place"),
        ("delete-bodies", "entry-lost"),
        ("delete-consumer", "pending-lost"),
        ("destroy-group", "no-place"),
    ],
)
def test_an_operator_finds_lisas_own_damage(papers: Papers, kind: str, left: str) -> None:
    foreign(papers, kind, {left: 3})
    assert accused(papers) == {"unexplained": 1}


def test_damage_repaired_before_is_no_excuse(papers: Papers) -> None:
    foreign(papers, "delete-bodies", {"no-body": 1})
    foreign(papers, "trim", {"no-body": 1}, 10.0)
    assert accused(papers) == {"unexplained": 1}


def test_damage_not_repaired_yet_is_an_excuse(papers: Papers) -> None:
    papers.fault("delete-bodies", "fickle", 5.0, 5.5)
    foreign(papers, "trim", {"no-body": 1}, 10.0)
    assert accused(papers) == {}


@pytest.mark.parametrize("is_lost", [False, True])
def test_at_the_end_a_repair_that_the_server_lost_is_made_again(
    papers: Papers, *, is_lost: bool
) -> None:
    foreign(papers, "trim", {"entry-lost": 1})
    if is_lost:
        papers.loss(4.0, 7.0)
    papers.events.append({"event": "repair", "at": us(40), "found": {"fickle": {"entry-lost": 1}}})
    assert accused(papers) == ({} if is_lost else {"unexplained": 1})


# Errors in the logs

TRACE = """2026-11-22T01:11:19.798Z WARNING lisa.consumer: topic hard: was not handled
Traceback (most recent call last):
  File "handlers.py", line 131, in handling
    raise Trouble(f"attempt {one.attempt}")
"""


def test_errors_that_were_only_logged(papers: Papers) -> None:
    papers.logs["consumer-1.log"] = (
        f"{TRACE}tests.torture.handlers.Trouble: attempt 1\n\n{TRACE}ValueError: no\n"
    )
    [found] = papers.verdicts().guilty["unexplained"]
    assert found.what == "consumer-1.log:8: ValueError: no"


def test_a_traceback_torn_by_a_kill_is_ignored(papers: Papers) -> None:
    papers.logs["consumer-1.log"] = f"{TRACE}{TRACE}ValueErr"
    papers.logs["archive-1.log"] = f"{TRACE}ValueError: no\n"
    assert accused(papers) == {}


def test_a_group_of_errors(papers: Papers) -> None:
    papers.logs["gateway-1.log"] = (
        "  + Exception Group Traceback (most recent call last):\n  |   File 'a.py', line 1\n"
    )
    assert accused(papers) == {"unexplained": 1}


# Growth


def long_run(papers: Papers, name: str, first: float, last: float, seconds: int = 1200) -> None:
    papers.events += [{"event": "load", "at": us(0)}, {"event": "sent", "at": us(seconds)}]
    papers.samples += [
        {"at": us(at), "found": {name: first + (last - first) * at / seconds}}
        for at in range(0, seconds + 1, 5)
    ]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("server used MB", 200.0),
        ("consumer-1 rss MB", 200.0),
        ("keys", 200_000.0),
    ],
)
def test_what_grows_in_a_long_run(papers: Papers, name: str, last: float) -> None:
    long_run(papers, name, last / 4, last)
    assert accused(papers) == {"unexplained": 1}


def test_what_may_grow(papers: Papers) -> None:
    long_run(papers, "garbage", 10.0, 1000.0)
    long_run(papers, "server used MB", 20.0, 30.0)
    assert accused(papers) == {}


def test_a_short_run_may_grow(papers: Papers) -> None:
    long_run(papers, "keys", 0.0, 200_000.0, seconds=500)
    assert accused(papers) == {}


# How many handlings are judged at all


def test_handlings_that_no_window_would_excuse_are_counted(papers: Papers) -> None:
    papers.begin(3, "consumer-2")
    papers.handle(papers.send(), 1.1)
    papers.handle(papers.send(), 1.1, process=3)
    papers.handle(papers.send(due="+30000"), 30.1)
    papers.fault("freeze-consumer", "consumer-1", 2.0, 4.0, numbers=[2])
    counts = papers.verdicts().counts
    assert counts["handlings"] == 3
    assert counts["handlings held to account"] == 2


@pytest.mark.parametrize(("since_s", "more"), [(2.0, {"skipped": "not done"}), (5.5, {})])
def test_a_skipped_or_later_fault_is_no_cause(
    papers: Papers, since_s: float, more: dict[str, str]
) -> None:
    papers.begin(3, "consumer-2")
    number = papers.send()
    papers.handle(number, 1.1)
    papers.handle(number, 5.0, attempt=2, process=3)
    papers.fault("server-kill", "server", since_s, since_s + 1, **more)
    assert accused(papers) == {"unexplained": 1}


# Schedules


def ticks(expected: list[int], found: list[int], **more: int | None) -> dict[str, Any]:
    one = {"version": 1, "behind_ms": 0, "expected": expected, "found": found, **more}
    return {"schedules": {"s": one}, "sent": len(found), "findings": []}


def test_schedules_whose_ticks_are_all_there(papers: Papers) -> None:
    papers.ticks = ticks([1, 2, 3], [1, 2, 3])
    assert accused(papers) == {}


def test_an_earlier_build_owes_no_ticks(papers: Papers) -> None:
    before, after = us(1.0) // 1000, us(3.0) // 1000
    papers.fault("roll", "server", 0.5, 2.0)
    papers.ticks = ticks([before, after], [after])
    assert accused(papers) == {}


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (ticks([1, 2, 3], [1, 3]), "lost"),
        (ticks([1, 2], [1, 2, 5]), "unexplained"),
        (ticks([1, 2], [1, 2], version=2), "unexplained"),
        (ticks([1, 2], [1, 2], behind_ms=60_000), "stuck"),
        (ticks([1, 2], [1, 2], behind_ms=None), "stuck"),
        ({**ticks([1, 2], [1, 2]), "sent": 3}, "unexplained"),
        ({**ticks([1, 2], [1, 2]), "findings": ["a tick without a schedule"]}, "unexplained"),
    ],
)
def test_schedules_with_a_fault(papers: Papers, wrong: dict[str, Any], fault: str) -> None:
    papers.ticks = wrong
    assert accused(papers) == {fault: 1}


def test_a_tick_may_be_lost_with_the_servers_data(papers: Papers) -> None:
    papers.loss(10.0, 11.0)
    papers.ticks = ticks([1, 2, 3], [1, 3])
    assert accused(papers) == {}


# Windows: the story begins 20 s into an odd minute, so even messages are open from 40 s to 100 s.


def even_and_odd(papers: Papers, **options: Any) -> tuple[int, int]:
    return papers.send("windows", **options), papers.send("windows", **options)


def test_messages_that_wait_for_their_windows(papers: Papers) -> None:
    even, odd = even_and_odd(papers)
    papers.handle(even, 40.1, topic="windows", due_s=40.0)
    papers.handle(odd, 1.1, topic="windows")
    late = papers.send("windows", at_s=38.0), papers.send("windows", at_s=38.0)
    papers.handle(late[0], 40.0, topic="windows", due_s=40.0)
    papers.handle(late[1], 100.0, topic="windows", due_s=100.0)
    papers.stats["windows"] = {"deferred@lisa": 3}
    found = papers.verdicts()
    assert found.is_clean
    assert found.counts["handlings with a window"] == 4
    assert found.counts["deferred"] == 3


@pytest.mark.parametrize(
    ("at_s", "guilty"), [(39.5, {"early": 1}), (39.999, {}), (100.3, {}), (101.0, {"early": 1})]
)
def test_a_message_that_is_handled_outside_its_window(
    papers: Papers, at_s: float, guilty: dict[str, int]
) -> None:
    even = papers.send("windows", at_s=at_s - 1, due="+1000")
    papers.handle(even, at_s, topic="windows", due_s=at_s)
    assert accused(papers) == guilty


def test_a_handler_that_stood_still_as_the_window_closed(papers: Papers) -> None:
    even = papers.send("windows", at_s=98.0)
    papers.handle(even, 102.0, topic="windows", due_s=99.0)
    papers.stalls[HANDLER] = [f"{us(99.8)}\t{us(101.9)}"]
    assert accused(papers) == {}


@pytest.mark.parametrize(
    ("due_s", "at_s", "fault"),
    [(160.0, 160.1, "late"), (45.0, 45.1, "late"), (40.0, 40.1, ""), (41.0, 41.1, "late")],
)
def test_the_due_time_of_a_message_with_a_window(
    papers: Papers, due_s: float, at_s: float, fault: str
) -> None:
    papers.handle(papers.send("windows"), at_s, topic="windows", due_s=due_s)
    assert accused(papers) == ({fault: 1} if fault else {})


@pytest.mark.parametrize(("since_s", "guilty"), [(60.0, {"unexplained": 1}), (30.0, {})])
def test_a_deferral_counts_no_attempt(
    papers: Papers, since_s: float, guilty: dict[str, int]
) -> None:
    papers.fault("freeze-consumer", "consumer-1", since_s, since_s + 6, numbers=[HANDLER])
    papers.handle(papers.send("windows"), 40.1, topic="windows", due_s=40.0, attempt=2)
    assert accused(papers) == guilty


@pytest.mark.parametrize(("process", "guilty"), [(9, {}), (8, {"unexplained": 1})])
def test_a_process_that_is_told_to_end_while_it_is_killed(
    papers: Papers, process: int, guilty: dict[str, int]
) -> None:
    papers.kill(process, 5.0, role="producer-1")
    papers.end("producer-1", "told to", -9)
    assert accused(papers) == guilty
