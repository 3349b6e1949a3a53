"""Which topic is looked at when, and by whom."""

from __future__ import annotations

import threading
import time

from lisa.manager.agenda import Agenda


def test_the_longest_due_comes_first_and_a_taken_one_is_nobody_elses() -> None:
    agenda = Agenda()
    for topic in ("a", "b", "c"):
        assert agenda.add(topic)
    assert not agenda.add("b")
    assert agenda.take(2) == ["a", "b"]
    assert agenda.take(2) == ["c"]
    agenda.put_back("b", time.monotonic())
    agenda.put_back("a", time.monotonic())
    assert agenda.take(1) == ["b"]
    assert agenda.take(1) == ["a"]


def test_a_topic_sleeps_until_its_instant() -> None:
    agenda = Agenda()
    agenda.add("a")
    agenda.take(1)
    at = time.monotonic() + 0.05
    agenda.put_back("a", at)
    assert agenda.take(1) == ["a"]
    assert time.monotonic() >= at


def test_a_hurried_topic_is_due_now_and_again_after_a_look_that_runs() -> None:
    agenda = Agenda()
    agenda.add("a")
    agenda.take(1)
    agenda.put_back("a", None)
    agenda.hurry("a")
    assert agenda.take(1) == ["a"]
    agenda.hurry("a")
    agenda.put_back("a", None)
    assert agenda.take(1) == ["a"]


def test_what_was_removed_while_taken_does_not_come_back() -> None:
    agenda = Agenda()
    for topic in ("a", "b"):
        agenda.add(topic)
    agenda.take(1)
    agenda.remove("a")
    agenda.put_back("a", time.monotonic())
    agenda.remove("b")
    agenda.hurry_all()
    agenda.add("c")
    assert agenda.take(5) == ["c"]


def test_an_earlier_instant_wakes_the_thread_that_sleeps_until_a_later_one() -> None:
    agenda = Agenda()
    agenda.add("a")
    agenda.take(1)
    agenda.put_back("a", time.monotonic() + 60)
    taken: list[list[str]] = []
    threads = [threading.Thread(target=lambda: taken.append(agenda.take(1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    agenda.hurry("a")
    agenda.add("b")
    while len(taken) < 2:
        time.sleep(0.001)
    agenda.close()
    for thread in threads:
        thread.join(5)
    assert sorted(taken) == [[], ["a"], ["b"]]


def test_when_the_leader_leaves_another_takes_its_place() -> None:
    agenda = Agenda()
    for topic in ("a", "b"):
        agenda.add(topic)
    agenda.take(2)
    soon = time.monotonic() + 0.02
    agenda.put_back("a", soon)
    agenda.put_back("b", soon + 0.02)
    taken: list[list[str]] = []
    threads = [threading.Thread(target=lambda: taken.append(agenda.take(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert taken == [["a"], ["b"]]


def test_one_topics_work_stays_on_one_thread() -> None:
    agenda = Agenda()
    seen: list[int] = []

    def work() -> None:
        topics = agenda.take(1)
        while topics:
            seen.append(threading.get_ident())
            topics = agenda.exchange([("a", time.monotonic() + 0.001)], 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(agenda._asleep) < len(threads):
        time.sleep(0.001)
    agenda.add("a")
    while len(seen) < 100:
        time.sleep(0.001)
    agenda.close()
    for thread in threads:
        thread.join(5)
    assert len(set(seen)) == 1


def test_what_another_thread_brings_back_wakes_the_one_that_sleeps_longer() -> None:
    agenda = Agenda()
    for topic in ("a", "b"):
        agenda.add(topic)
    assert agenda.take(2) == ["a", "b"]
    agenda.put_back("a", time.monotonic() + 60)
    taken: list[list[str]] = []
    thread = threading.Thread(target=lambda: taken.append(agenda.take(1)))
    thread.start()
    time.sleep(0.01)
    agenda.put_back("b", time.monotonic() + 0.01)
    thread.join(5)
    assert taken == [["b"]]


def test_a_glance_brings_forward_and_never_puts_off() -> None:
    agenda = Agenda()
    for topic in ("a", "b", "c"):
        agenda.add(topic)
    assert agenda.take(3) == ["a", "b", "c"]
    now = time.monotonic()
    agenda.put_back("a", now + 60)
    agenda.put_back("b", now)
    agenda.bring_forward({"a": now + 0.01, "b": now + 60, "c": now + 0.02, "unknown": now})
    agenda.put_back("c", None)
    assert [agenda.take(1) for _ in range(3)] == [["b"], ["a"], ["c"]]
    assert time.monotonic() >= now + 0.02


def test_a_topic_that_is_hurried_often_leaves_no_heap_behind() -> None:
    agenda = Agenda()
    agenda.add("a")
    for _ in range(1_000):
        agenda.take(1)
        agenda.put_back("a", time.monotonic() + 3_600)
        agenda.hurry("a")
    assert len(agenda._heap) < 100


def test_overdue_tells_that_no_thread_comes() -> None:
    agenda = Agenda()
    assert agenda.overdue_s() == 0
    agenda.add("a")
    time.sleep(0.01)
    assert agenda.overdue_s() >= 0.01
