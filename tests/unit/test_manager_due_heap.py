"""Which topic is processed when, and by which thread."""

from __future__ import annotations

import threading
import time

from lisa.manager.due_heap import DueHeap


def test_the_longest_due_is_first_and_a_taken_topic_is_not_taken_twice() -> None:
    heap = DueHeap()
    for topic in ("a", "b", "c"):
        assert heap.add(topic)
    assert not heap.add("b")
    assert heap.take(2) == ["a", "b"]
    assert heap.take(2) == ["c"]
    heap.put_back("b", time.monotonic())
    heap.put_back("a", time.monotonic())
    assert heap.take(1) == ["b"]
    assert heap.take(1) == ["a"]


def test_a_topic_sleeps_until_its_instant() -> None:
    heap = DueHeap()
    heap.add("a")
    heap.take(1)
    at = time.monotonic() + 0.05
    heap.put_back("a", at)
    assert heap.take(1) == ["a"]
    assert time.monotonic() >= at


def test_schedule_now_makes_a_topic_due_now_or_after_the_running_step() -> None:
    heap = DueHeap()
    heap.add("a")
    heap.take(1)
    heap.put_back("a", None)
    heap.schedule_now("a")
    assert heap.take(1) == ["a"]
    heap.schedule_now("a")
    heap.put_back("a", None)
    assert heap.take(1) == ["a"]


def test_a_topic_removed_while_taken_stays_removed() -> None:
    heap = DueHeap()
    for topic in ("a", "b"):
        heap.add(topic)
    heap.take(1)
    heap.remove("a")
    heap.put_back("a", time.monotonic())
    heap.remove("b")
    heap.schedule_all_now()
    heap.add("c")
    assert heap.take(5) == ["c"]


def test_an_earlier_instant_wakes_the_thread_that_sleeps_until_a_later_one() -> None:
    heap = DueHeap()
    heap.add("a")
    heap.take(1)
    heap.put_back("a", time.monotonic() + 60)
    taken: list[list[str]] = []
    threads = [threading.Thread(target=lambda: taken.append(heap.take(1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    heap.schedule_now("a")
    heap.add("b")
    while len(taken) < 2:
        time.sleep(0.001)
    heap.close()
    for thread in threads:
        thread.join(5)
    assert sorted(taken) == [[], ["a"], ["b"]]


def test_another_thread_leads_when_the_leader_leaves() -> None:
    heap = DueHeap()
    for topic in ("a", "b"):
        heap.add(topic)
    heap.take(2)
    soon = time.monotonic() + 0.02
    heap.put_back("a", soon)
    heap.put_back("b", soon + 0.02)
    taken: list[list[str]] = []
    threads = [threading.Thread(target=lambda: taken.append(heap.take(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert taken == [["a"], ["b"]]


def test_one_topics_work_stays_on_one_thread() -> None:
    heap = DueHeap()
    seen: list[int] = []

    def work() -> None:
        topics = heap.take(1)
        while topics:
            seen.append(threading.get_ident())
            topics = heap.exchange([("a", time.monotonic() + 0.001)], 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(heap._asleep) < len(threads):
        time.sleep(0.001)
    heap.add("a")
    while len(seen) < 100:
        time.sleep(0.001)
    heap.close()
    for thread in threads:
        thread.join(5)
    assert len(set(seen)) == 1


def test_put_back_wakes_a_thread_that_sleeps_longer() -> None:
    heap = DueHeap()
    for topic in ("a", "b"):
        heap.add(topic)
    assert heap.take(2) == ["a", "b"]
    heap.put_back("a", time.monotonic() + 60)
    taken: list[list[str]] = []
    thread = threading.Thread(target=lambda: taken.append(heap.take(1)))
    thread.start()
    time.sleep(0.01)
    heap.put_back("b", time.monotonic() + 0.01)
    thread.join(5)
    assert taken == [["b"]]


def test_bring_forward_never_postpones() -> None:
    heap = DueHeap()
    for topic in ("a", "b", "c"):
        heap.add(topic)
    assert heap.take(3) == ["a", "b", "c"]
    now = time.monotonic()
    heap.put_back("a", now + 60)
    heap.put_back("b", now)
    heap.bring_forward({"a": now + 0.01, "b": now + 60, "c": now + 0.02, "unknown": now})
    heap.put_back("c", None)
    assert [heap.take(1) for _ in range(3)] == [["b"], ["a"], ["c"]]
    assert time.monotonic() >= now + 0.02


def test_frequent_rescheduling_does_not_grow_the_heap() -> None:
    heap = DueHeap()
    heap.add("a")
    for _ in range(1_000):
        heap.take(1)
        heap.put_back("a", time.monotonic() + 3_600)
        heap.schedule_now("a")
    assert len(heap._heap) < 100


def test_overdue_grows_while_no_thread_takes_a_due_topic() -> None:
    heap = DueHeap()
    assert heap.overdue_s() == 0
    heap.add("a")
    time.sleep(0.01)
    assert heap.overdue_s() >= 0.01
