"""Service threads: restart after exceptions, and report stalled or ended threads."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from lisa.core.daemon import threads
from lisa.core.daemon.threads import (
    ServiceThread,
    longest_round_s,
    rest,
    stalled,
    unforeseen_errors,
)
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RESTART_AFTER_S", 0.01)


@pytest.mark.parametrize("error", [AttributeError("none"), SystemExit(3), KeyError("k")])
def test_work_that_raises_is_logged_counted_and_run_again(
    error: BaseException, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    before = unforeseen_errors()

    def work() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise error
        ended.wait(10)

    thread = ServiceThread("lisa-test", work)
    thread.start()
    wait_until(lambda: len(calls) == 3)
    assert thread.is_alive()
    assert thread.fault is None
    assert unforeseen_errors() - before == 2
    (*_, record) = [one for one in caplog.records if "lisa-test: unexpected error" in one.message]
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    ended.set()
    thread.join(10)


def test_work_that_raises_after_the_end_is_not_restarted() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        sys.exit(1)

    thread = ServiceThread("lisa-test", work, is_over=lambda: True)
    thread.start()
    thread.join(10)
    assert calls == [1]


def test_a_long_round_is_a_fault_and_a_long_rest_is_not(ended: threading.Event) -> None:
    may_rest = threading.Event()

    def work() -> None:
        threads.begin_round()
        may_rest.wait(10)
        rest()
        ended.wait(10)

    thread = ServiceThread("lisa-test", work, longest_s=0.05)
    assert stalled([thread]) == [], "one that has not started has no fault"
    thread.start()
    wait_until(lambda: thread.fault is not None)
    assert stalled([thread]) == ["thread lisa-test has not completed a round for 0 s"]
    may_rest.set()
    wait_until(lambda: thread.fault is None)
    assert thread.age_s < 5
    ended.set()
    thread.join(10)
    assert stalled([thread]) == ["thread lisa-test has ended, 0 s after its last round"]


def test_the_bound_follows_the_configured_timeout() -> None:
    assert longest_round_s(5) == 50
    assert longest_round_s(60) == 270
