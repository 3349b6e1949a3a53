"""Each verdict of the checker can be provoked, and similar but innocent cases are acquitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.torture.checker import check
from tests.torture.papers import accused, us
from tests.torture.reading import load
from tests.torture.report import lateness, redelivery
from tests.torture.world import ACK_S, Do, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torture.papers import Papers


def test_a_plain_story_is_clean(papers: Papers) -> None:
    number = papers.send()
    papers.handle(number, 1.002)
    verdicts = papers.verdicts()
    assert verdicts.is_clean
    assert not verdicts.excused
    assert verdicts.counts["confirmed"] == verdicts.counts["handlings"] == 1


# Lost


def test_confirmed_but_never_handled_is_lost(papers: Papers) -> None:
    papers.handle(papers.send(), 1.1)
    lost = papers.send()
    found = papers.verdicts().guilty
    assert [one.number for one in found["lost"]] == [lost]
    assert not any(found[name] for name in found if name != "lost")


def test_lost_in_one_of_two_groups(papers: Papers) -> None:
    number = papers.send("two")
    papers.handle(number, 1.1, topic="two", group="west")
    [found] = papers.verdicts().guilty["lost"]
    assert found.number == number
    assert "two/east" in found.what


def test_begun_and_failed_is_not_handled(papers: Papers) -> None:
    papers.handle(papers.send("hard"), 1.1, topic="hard", verdict=Verdict.FAILED)
    papers.handle(papers.send("hard"), 1.1, topic="hard", took_s=None)
    assert accused(papers) == {"lost": 2}


def unconfirmed(papers: Papers) -> None:
    papers.send(confirmed=False)


def cancelled(papers: Papers) -> None:
    papers.cancel(papers.send(), 0.5)


def perhaps_cancelled(papers: Papers) -> None:
    papers.cancel(papers.send(), 0.5, answer=None)


def replaced(papers: Papers) -> None:
    new = papers.replace(papers.send(), 0.5, "+1000")
    papers.handle(new, 1.6)


def discarded(papers: Papers) -> None:
    number = papers.send("hard", do=Do.DISCARD)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.DISCARDED)
    papers.stay(number, "garbage", "hard")


def expired(papers: Papers) -> None:
    papers.send(ttl_ms=500)
    papers.stats["fickle"] = {"expired": 1}


def skipped(papers: Papers) -> None:
    papers.send(ttl_ms=2_000)
    papers.stats["fickle"] = {"skipped": 1}


@pytest.mark.parametrize(
    "story", [unconfirmed, cancelled, perhaps_cancelled, replaced, discarded, expired, skipped]
)
def test_not_lost(papers: Papers, story: Callable[[Papers], None]) -> None:
    story(papers)
    assert accused(papers) == {}


def test_a_replacement_can_be_lost(papers: Papers) -> None:
    papers.replace(papers.send(), 0.5, "+1000")
    assert accused(papers) == {"lost": 1}


def test_a_late_cancel_takes_nothing_back(papers: Papers) -> None:
    papers.cancel(papers.send(), 0.5, answer="i")
    assert accused(papers) == {"lost": 1}


def test_a_ttl_is_no_excuse_where_nothing_expired(papers: Papers) -> None:
    papers.send(ttl_ms=500)
    assert accused(papers) == {"lost": 1}


@pytest.mark.parametrize("late_s", [0.02, 0.3])
@pytest.mark.parametrize("is_troubled", [False, True])
def test_a_ttl_is_no_excuse_where_others_were_in_time(
    papers: Papers, late_s: float, *, is_troubled: bool
) -> None:
    papers.send(ttl_ms=500)
    papers.stats["fickle"] = {"expired": 1}
    for _ in range(10):
        papers.handle(papers.send(), 1.0 + late_s, due_s=1.0)
    if is_troubled:
        papers.fault("cut", "consumer", 0.5, 0.6)
    assert accused(papers) == ({"lost": 1} if late_s < 0.05 and not is_troubled else {})


def test_a_discarded_message_missing_from_garbage_is_lost(papers: Papers) -> None:
    papers.handle(papers.send("hard", do=Do.DISCARD), 1.1, topic="hard", verdict=Verdict.DISCARDED)
    assert accused(papers) == {"lost": 1}


@pytest.mark.parametrize("ttl_ms", [0, 500])
def test_a_body_deleted_by_another_program_is_excused_by_name(papers: Papers, ttl_ms: int) -> None:
    deleted, lost = papers.send(ttl_ms=ttl_ms), papers.send()
    papers.fault("delete-bodies", "fickle", 0.5, 0.6, messages=[deleted], deleted=True)
    verdicts = papers.verdicts()
    assert [one.number for one in verdicts.excused["lost"]] == [deleted]
    assert [one.number for one in verdicts.guilty["lost"]] == [lost]


def test_losses_by_the_server_are_excused_by_name_but_nothing_before_them(papers: Papers) -> None:
    before, lost = papers.send(at_s=1.0), papers.send(at_s=2.5)
    papers.loss(2.0, 3.0)
    verdicts = papers.verdicts()
    assert [one.number for one in verdicts.excused["lost"]] == [lost]
    assert [one.number for one in verdicts.guilty["lost"]] == [before]


def test_archived_messages_must_have_been_restored(papers: Papers) -> None:
    archived, lost = papers.send("bulk"), papers.send("bulk")
    papers.archived = [archived]
    papers.loss(0.0, 1.0)
    verdicts = papers.verdicts()
    assert [one.number for one in verdicts.excused["lost"]] == [lost]
    assert [one.number for one in verdicts.guilty["lost"]] == [archived]


# Early


def test_early_by_its_own_due_time(papers: Papers) -> None:
    papers.handle(papers.send(), 1.0, due_s=1.001)
    assert accused(papers) == {"early": 1}


def test_early_in_a_retry(papers: Papers) -> None:
    number = papers.send("hard", do=Do.RAISE)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.FAILED)
    papers.handle(number, 1.35, topic="hard", attempt=2, due_s=1.4)
    assert accused(papers) == {"early": 1}


def test_early_because_its_due_time_was_set_wrong(papers: Papers) -> None:
    papers.handle(papers.send(due="+1000"), 1.0, due_s=0.95)
    assert accused(papers) == {"early": 1}


def test_early_by_an_absolute_due_time(papers: Papers) -> None:
    papers.handle(papers.send(due=str(us(2.0) // 1000)), 1.5)
    assert accused(papers) == {"early": 1}


def test_early_after_it_was_put_off(papers: Papers) -> None:
    number = papers.send()
    papers.move(number, 0.5, "+3000")
    papers.handle(number, 1.1)
    assert accused(papers) == {"early": 1}


@pytest.mark.parametrize("answer", ["r", "i", None])
def test_brought_forward_is_not_early(papers: Papers, answer: str | None) -> None:
    number = papers.send(due="+5000")
    papers.move(number, 0.5, "+0", answer)
    papers.handle(number, 0.6)
    assert accused(papers) == {}


@pytest.mark.parametrize("answer", ["i", None])
def test_possibly_put_off_is_not_early(papers: Papers, answer: str | None) -> None:
    number = papers.send()
    papers.move(number, 0.5, "+3000", answer)
    papers.handle(number, 1.1)
    assert accused(papers) == {}


def test_put_off_but_the_server_lost_it_is_not_early(papers: Papers) -> None:
    number = papers.send()
    papers.move(number, 0.5, "+3000")
    papers.loss(0.3, 0.8)
    papers.handle(number, 1.1)
    assert accused(papers) == {}


def test_a_repeat_of_an_unconfirmed_send_may_set_an_earlier_due_time(papers: Papers) -> None:
    number = papers.send(due="+3000", confirmed=False)
    papers.again(number, 0.1, "+1000")
    papers.handle(number, 1.2)
    assert accused(papers) == {}


# After a cancel


def test_handled_after_a_confirmed_cancel(papers: Papers) -> None:
    number = papers.send()
    papers.cancel(number, 0.5)
    papers.handle(number, 1.1)
    assert accused(papers) == {"after cancel": 1}


def test_handled_before_the_cancel_was_confirmed(papers: Papers) -> None:
    number = papers.send()
    papers.cancel(number, 1.095)
    papers.handle(number, 1.1)
    assert accused(papers) == {}


def test_a_cancel_that_the_server_lost_is_excused(papers: Papers) -> None:
    number = papers.send()
    papers.cancel(number, 0.5)
    papers.loss(0.3, 0.8)
    papers.handle(number, 1.1)
    verdicts = papers.verdicts()
    assert verdicts.is_clean
    assert [one.number for one in verdicts.excused["after cancel"]] == [number]


@pytest.mark.parametrize(("process", "guilty"), [(2, {}), (3, {"after cancel": 1})])
def test_only_a_handler_that_was_frozen_itself_is_excused(
    papers: Papers, process: int, guilty: dict[str, int]
) -> None:
    number = papers.send()
    papers.begin(3, "consumer-2")
    papers.cancel(number, 5.0)
    papers.fault("freeze-consumer", "consumer-1", 1.0, 6.0, numbers=[2])
    papers.handle(number, 6.001, process=process)
    assert accused(papers) == guilty


def test_an_instant_without_an_answer_from_redis_proves_nothing(
    papers: Papers,
) -> None:
    number = papers.send()
    papers.cancel(number, 1.0)
    papers.handle(number, 1.2, asked=False)
    assert accused(papers) == {}


# Handled again


def twice(papers: Papers, *, first_s: float = 1.1, second_s: float = 5.0, by: int = 3) -> int:
    """One message handled successfully by two processes, 2 and another."""
    papers.begin(3, "consumer-2")
    number = papers.send()
    papers.handle(number, first_s)
    papers.handle(number, second_s, attempt=2, process=by)
    return number


def test_handled_again_without_a_cause(papers: Papers) -> None:
    twice(papers)
    assert accused(papers) == {"unexplained": 1}


def killed(papers: Papers) -> None:
    twice(papers)
    papers.kill(2, 1.2)


def killed_in_the_middle(papers: Papers) -> None:
    papers.begin(3, "consumer-2")
    number = papers.send("hard", do=Do.SLOWER)
    papers.handle(number, 1.1, took_s=None, topic="hard")
    papers.handle(number, 30.0, topic="hard", process=3)
    papers.kill(2, 4.0)


def frozen(papers: Papers) -> None:
    twice(papers)
    papers.fault("freeze-consumer", "consumer-1", 1.0, 6.0, numbers=[2])


def cut_off(papers: Papers) -> None:
    twice(papers)
    papers.fault("cut", "consumer", 1.0, 1.2)


def server_killed(papers: Papers) -> None:
    twice(papers)
    papers.fault("server-kill", "server", 2.0, 3.0)


def trimmed(papers: Papers) -> None:
    papers.fault("trim", "fickle/lisa", 1.0, 1.2, messages=[twice(papers)])


def group_destroyed(papers: Papers) -> None:
    number = papers.send("hard", do=Do.SLOW)
    papers.handle(number, 1.1, took_s=0.5, topic="hard")
    papers.handle(number, 1.3, topic="hard")
    papers.fault("destroy-group", "hard/lisa", 1.2, 1.2, places=[16], redelivers=True)


def ack_lost_by_the_server(papers: Papers) -> None:
    twice(papers, second_s=30.0)
    papers.loss(1.0, 3.0)


def stood_still(papers: Papers) -> None:
    twice(papers)
    papers.stalls[2] = [f"{us(1.0)}\t{us(4.0)}"]


def woke_late(papers: Papers) -> None:
    twice(papers, by=3)
    papers.fault("freeze-consumer", "consumer-2", 0.9, 4.9, numbers=[3])


def hung(papers: Papers) -> None:
    number = papers.send("hang", do=Do.HANG)
    papers.handle(number, 1.1, took_s=6.0, topic="hang")
    papers.handle(number, 5.0, topic="hang", attempt=2)


def hung_until_it_was_killed(papers: Papers) -> None:
    number = papers.send("hang", do=Do.HANG)
    papers.handle(number, 1.1, took_s=None, topic="hang")
    papers.handle(number, 5.6, topic="hang", attempt=2)
    papers.kill(2, 6.5)


def failed(papers: Papers) -> None:
    number = papers.send("hard", do=Do.RAISE)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.FAILED)
    papers.handle(number, 1.4, topic="hard", attempt=2)


def failed_at_an_uncertain_time(papers: Papers) -> None:
    number = papers.send("hard", do=Do.RAISE)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.FAILED, unsure_s=0.06)
    papers.handle(number, 1.2, topic="hard", attempt=2, unsure_s=0.06)


def failed_and_moved_to_now(papers: Papers) -> None:
    number = papers.send("hard", do=Do.RAISE)
    papers.handle(number, 1.1, topic="hard", verdict=Verdict.FAILED)
    papers.move(number, 1.15, "+0")
    papers.handle(number, 1.17, topic="hard", attempt=2)


def by_another_group(papers: Papers) -> None:
    number = papers.send("two")
    papers.handle(number, 1.1, topic="two", group="east")
    papers.handle(number, 1.1, topic="two", group="west")


@pytest.mark.parametrize(
    "story",
    [
        killed,
        killed_in_the_middle,
        frozen,
        cut_off,
        server_killed,
        trimmed,
        group_destroyed,
        ack_lost_by_the_server,
        stood_still,
        woke_late,
        hung,
        hung_until_it_was_killed,
        failed,
        failed_at_an_uncertain_time,
        failed_and_moved_to_now,
        by_another_group,
    ],
)
def test_handled_again_with_a_cause(papers: Papers, story: Callable[[Papers], None]) -> None:
    story(papers)
    assert accused(papers) == {}


def of_another_process(papers: Papers) -> None:
    twice(papers)
    papers.kill(4, 1.2, "consumer-4")
    papers.fault("freeze-consumer", "consumer-3", 1.0, 6.0, numbers=[5])


def at_another_door(papers: Papers) -> None:
    twice(papers)
    papers.fault("hang", "producer", 1.0, 6.0)
    papers.fault("cut", "gateway", 1.0, 6.0)


def long_before(papers: Papers) -> None:
    twice(papers, first_s=20.0, second_s=25.0)
    papers.fault("server-kill", "server", 2.0, 3.0)
    papers.fault("freeze-consumer", "consumer-1", 2.0, 8.0, numbers=[2])


def long_after(papers: Papers) -> None:
    twice(papers, second_s=40.0)
    papers.kill(2, 20.0)
    papers.fault("server-kill", "server", 19.0, 20.0)


def of_another_message(papers: Papers) -> None:
    twice(papers)
    papers.fault("trim", "fickle/lisa", 1.0, 1.2, messages=[12345])


def that_does_no_such_thing(papers: Papers) -> None:
    twice(papers)
    papers.fault("script-flush", "server", 1.0, 1.2)
    papers.fault("kill-manager", "manager-1", 1.0, 1.2, numbers=[7], killed=us(1.0))


@pytest.mark.parametrize(
    "story",
    [
        of_another_process,
        at_another_door,
        long_before,
        long_after,
        of_another_message,
        that_does_no_such_thing,
    ],
)
def test_a_fault_is_no_cause(papers: Papers, story: Callable[[Papers], None]) -> None:
    story(papers)
    assert accused(papers) == {"unexplained": 1}


# What is left


@pytest.mark.parametrize("state", ["waiting", "ready", "in_flight", "retry"])
def test_stuck(papers: Papers, state: str) -> None:
    papers.stay(papers.send(), state, group=None if state == "waiting" else "lisa")
    assert accused(papers) == {"stuck": 1}


def dead_for_no_reason(papers: Papers) -> None:
    papers.stay(papers.send(), "garbage", reason="ack timeout")


def handled_but_unknown(papers: Papers) -> None:
    papers.handle(99, 1.0)


def found_by_fsck(papers: Papers) -> None:
    papers.findings.append({"kind": "no-place", "topic": "fickle", "id": "1-0", "what": ""})


def a_body_too_many(papers: Papers) -> None:
    papers.bodies = 1


def a_role_that_died(papers: Papers) -> None:
    papers.end("manager-1", "by itself", 0)


def a_role_that_left_badly(papers: Papers) -> None:
    papers.end("consumer-1", "told to", -15)


@pytest.mark.parametrize(
    "story",
    [
        dead_for_no_reason,
        handled_but_unknown,
        found_by_fsck,
        a_body_too_many,
        a_role_that_died,
        a_role_that_left_badly,
    ],
)
def test_unexplained(papers: Papers, story: Callable[[Papers], None]) -> None:
    story(papers)
    assert accused(papers) == {"unexplained": 1}


def test_expected_ends_of_processes(papers: Papers) -> None:
    papers.end("manager-1", "told to", 0)
    papers.end("consumer-1", "killed", -9)
    papers.end("producer-1", "told to", -15, age_s=0.5)
    assert accused(papers) == {}


# Reading and measuring


def test_a_line_torn_by_a_kill_is_ignored(papers: Papers) -> None:
    number = papers.send()
    papers.handle(number, 1.1)
    papers.sent.append("S\t7\t17000")
    papers.handled[2].append("4294967296\t24")
    papers.write()
    for name in ("sent-1.tsv", "handled-2.tsv"):
        path = papers.out / "ledgers" / name
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
    verdicts = check(load(papers.out))
    assert verdicts.is_clean
    assert verdicts.counts["handlings"] == 1


def test_a_handling_with_its_beginning_counts_once(papers: Papers) -> None:
    number = papers.send("hard", do=Do.SLOW)
    papers.handle(number, 1.1, took_s=None, topic="hard")
    papers.handle(number, 1.1, took_s=0.3, topic="hard")
    assert papers.verdicts().counts["handlings"] == 1


def test_a_batch_of_sends_is_one_line(papers: Papers) -> None:
    papers.sent += [
        f"S\t1\t{us(0)}\t0\t{1 << 32}\t3\t0\t+1000,+2000,+3000\t0",
        f"C\t1\t{us(0.1)}\ta",
    ]
    for place, at_s in enumerate((1.1, 2.1, 2.9)):
        papers.handle((1 << 32) + place, at_s, topic="bulk")
    found = papers.verdicts()
    assert found.counts["confirmed"] == 3
    assert [one.number for one in found.guilty["early"]] == [(1 << 32) + 2]


def test_messages_settled_before_an_error_are_confirmed(papers: Papers) -> None:
    papers.sent += [
        f"S\t1\t{us(0)}\t0\t{1 << 32}\t3\t0\t+1000\t0",
        f"E\t1\t{us(4)}\t2\tServerUnavailable",
    ]
    papers.fault("refuse", "producer", 0.5, 2.5)
    assert accused(papers) == {"lost": 2}


def test_lateness_inside_and_outside_of_faults(papers: Papers) -> None:
    for number, late_ms in enumerate((1, 2, 3)):
        papers.handle(papers.send(), 1.5 + number / 10 + late_ms / 1e3, due_s=1.5 + number / 10)
    papers.handle(papers.send(), 12.5, due_s=9.9)
    papers.fault("server-kill", "server", 10.0, 12.0)
    found = lateness(papers.run(), [papers.events[-1]])
    assert found["outside faults"]["messages"] == 3
    assert found["outside faults"]["p50"] == 2
    assert found["inside faults"] == {"messages": 1} | dict.fromkeys(
        ("p50", "p90", "p99", "p99.9", "max"), 2600
    )


def test_redelivery_is_counted_in_ack_timeouts(papers: Papers) -> None:
    killed_in_the_middle(papers)
    found = redelivery(papers.run())
    assert found["alone"]["max"] == round((30.0 - 4.0) / ACK_S, 3)
