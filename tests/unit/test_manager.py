"""A manager's plan, its jobs, and its estimate of the server's clock."""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lisa.core.model.backoff import FIRST_S, LONGEST_S
from lisa.core.model.errors import ConfigError, InvalidMessage, LisaError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.settings import ManagerSettings
from lisa.core.store.store import SyncStore
from lisa.manager.bulk_reads import Turns
from lisa.manager.jobs import Jobs
from lisa.manager.nodes import Node
from lisa.manager.plan import Plan, Schedules, TopicPlan, differences
from lisa.manager.server_clock import ServerClock
from lisa.manager.topic_log import TopicErrors
from tests.servers import wait_until

OFTEN = timedelta(milliseconds=100)


def plan(
    topics: Mapping[str, Mapping[str, object]] | Iterable[str] = (),
    groups: Mapping[str, Iterable[str]] | None = None,
) -> Plan:
    return Plan.of(topics, groups or {}, default_group="lisa", schedules=Schedules())


class TestPlan:
    def test_options_and_groups_of_both_arguments(self) -> None:
        assert plan(["orders"]).topics == {"orders": TopicPlan()}
        assert plan(["orders"]).groups_for("orders") == ("lisa",)
        options = {"ack_timeout": timedelta(seconds=30), "max-ready": 5, "groups": ["a", "b"]}
        made = plan({"orders": options, "hooks": {"group": "h"}}, {"orders": ["b", "c"]})
        assert made.topics["orders"].options == {"ack_timeout": "30000", "max_ready": "5"}
        assert made.groups_for("orders") == ("b", "c", "a")
        assert made.groups_for("hooks") == ("h",)

    def test_invalid_arguments_are_refused(self) -> None:
        refused: dict[str, tuple[Any, Any]] = {
            "is a string": ("orders", {}),
            "ack_timeout": ({"orders": {"acktimeout": "1s"}}, {}),
            "lisa topic pause": ({"orders": {"paused": True}}, {}),
            "group 7": ({"orders": {"groups": [7]}}, {}),
            "topic 'a b'": (["a b"], {}),
            "list of names": ([], {"orders": "billing"}),
            "group 'no good'": ([], {"orders": ["no good"]}),
        }
        for said, (topics, groups) in refused.items():
            with pytest.raises((ConfigError, InvalidMessage), match=said):
                plan(topics, groups)

    def test_a_configuration_file_gives_the_same_plan(self, tmp_path: Path) -> None:
        file = tmp_path / "manager.yml"
        file.write_text(
            """
lisa-delay-queue:
  manager-server:
    crontab-move-to-ready-queue: '0/2 * * * * ?'
    count: 20
    timeout: 30000
  default-group: house
  groups:
    - {topic: orders, group: a, moving-size: 20, max-length: 7}
    - {topic: orders, group: b}
    - {topic: mails}
""",
            encoding="utf-8",
        )
        made = Plan.from_settings(ManagerSettings.load(file))
        assert made.topics["orders"] == TopicPlan(
            groups=("a", "b"), options={"ack_timeout": "30000", "max_ready": "7"}, batch=20
        )
        assert made.topics["mails"].options == {"ack_timeout": "30000"}
        assert made.groups_for("mails") == ("house",)
        assert made.topics["mails"].batch == 250
        assert (made.window, made.schedules.move) == (20, "0/2 * * * * ?")

    def test_differences_are_described(self) -> None:
        old = plan({"a": {"ack_timeout": "1s", "group": "g"}, "gone": {}})
        new = plan({"a": {"ack_timeout": "2s", "capacity": 5, "group": "h"}, "b": {}})
        assert differences(old, new) == [
            "topic a: ack_timeout 1000 -> 2000",
            "topic a: capacity default -> 5",
            "topic a: group h added",
            "topic a: group g no longer configured; use `lisa topic group remove` to remove it",
            "topic b: new",
            "topic gone: no longer configured; its messages and keys stay",
        ]
        assert differences(new, new) == []
        assert differences(new, replace(new, default_group="h")) == ["default-group lisa -> h"]


def test_errors_of_a_topic_are_logged_once_and_followed_by_growing_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    errors = TopicErrors("test")
    pauses = [errors.failed("a", LisaError(said)) for said in ("one", "one", *["two"] * 18)]
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses[-1] == LONGEST_S
    errors.failed("b", ServerUnavailable("away"), quietly=True)
    for topic in ("a", "a", "b"):
        errors.passed(topic)
    assert errors.of("a") is None
    assert errors.failed("a", LisaError("one"), quietly=True) == FIRST_S
    assert caplog.messages == [
        "test: topic a: one; trying again",
        "test: topic a: two; trying again",
        "test: topic a works again",
    ]


def test_each_of_many_topics_has_its_turn() -> None:
    turns, topics = Turns(), [f"t{number * 7 % 300:03}" for number in range(300)]
    parts = [turns.next(topics, 128) for _ in range(3)]
    assert [len(part) for part in parts] == [128] * 3
    assert {topic for part in parts for topic in part} == set(topics)
    assert turns.next(topics[:128], 128) == topics[:128]


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """Jobs of four topics; the node of the last is unavailable."""
    nodes = SimpleNamespace(
        is_any_available=True,
        is_available=lambda topic: topic != "d",
    )
    made = Jobs(cast("Any", nodes))
    yield made
    made.stop()


class TestJobs:
    def test_a_job_continues_after_an_error_in_one_topic(self, jobs: Jobs) -> None:
        seen: list[str] = []

        def work(topic: str) -> None:
            seen.append(topic)
            if topic == "b":
                raise LisaError("no")

        jobs.add_for_each("clean", OFTEN, lambda: "abcd", work)
        jobs.start()
        wait_until(lambda: len(seen) >= 6)
        assert seen[:6] == ["a", "b", "c", "a", "b", "c"]

    def test_a_slow_job_delays_no_other_job_and_never_runs_twice_at_once(self, jobs: Jobs) -> None:
        quick, running, at_once = Counter[str](), threading.Lock(), list[bool]()

        def dawdle() -> None:
            at_once.append(not running.acquire(blocking=False))
            if len(at_once) == 1:  # several ticks of its own pass, too
                before = quick["runs"]
                wait_until(lambda: quick["runs"] >= before + 4, timeout=timedelta(seconds=20))
            running.release()

        jobs.add("slow", OFTEN, dawdle)
        jobs.add("quick", OFTEN, lambda: quick.update(["runs"]))
        jobs.start()
        wait_until(lambda: len(at_once) >= 2)
        assert not any(at_once)

    @pytest.mark.parametrize("step", [timedelta(hours=-1), timedelta(days=20_000)])
    def test_jobs_run_on_when_the_clock_is_set(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, step: timedelta
    ) -> None:
        set_by, runs = [timedelta()], Counter[str]()

        class SetClock(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + set_by[0]

        monkeypatch.setattr("apscheduler.schedulers.base.datetime", SetClock)
        monkeypatch.setattr("lisa.manager.jobs.datetime", SetClock)
        jobs.add("interval", OFTEN, lambda: runs.update(["interval"]))
        jobs.add("cron", "0/1 * * * * ?", lambda: runs.update(["cron"]))
        jobs.start()
        wait_until(lambda: runs["interval"])
        set_by[0] = step
        before = runs.copy()
        wait_until(lambda: all(runs[name] > before[name] + 1 for name in ("interval", "cron")))

    def test_a_scheduler_that_has_ended_is_a_fault_but_a_starting_one_is_not(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ConfigError, match="61"):
            jobs.add("x", "61 * * * * ?", lambda: None)
        seen: list[list[str]] = []

        class Slow(threading.Thread):
            def start(self) -> None:
                seen.append(jobs.faults())
                super().start()
                seen.append(jobs.faults())

        monkeypatch.setattr("apscheduler.schedulers.background.Thread", Slow)
        jobs.add("x", timedelta(seconds=10), lambda: None)
        jobs.start()
        assert seen == [[], []]
        with monkeypatch.context() as ended:
            ended.setattr(jobs._scheduler._thread, "is_alive", lambda: False)
            assert jobs.faults() == ["the scheduler's thread has ended"]


def test_a_node_answers_while_the_next_probe_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    probed = SimpleNamespace(is_change=False, gap_s=1.0)
    replies = iter([probed, probed, None])

    def step() -> object:
        seen.append(node.answers)
        return next(replies)

    store = SyncStore(Connection(Address("redis://localhost:1/0")), Keys())
    node = Node(store, ServerClock(), lambda *_: None)
    monkeypatch.setattr(node, "step", step)
    for _ in range(3):
        node.probe()
    assert seen == [False, True, True]
    assert not node.answers


class TestServerClock:
    """Each call is observed with the server's time, and when it was sent and answered."""

    def observed(self, *calls: tuple[int, float, float]) -> ServerClock:
        clock = ServerClock()
        for server_ms, sent, received in calls:
            clock.observe(server_ms, sent, received)
        return clock

    def test_overlapping_bounds_narrow_the_estimate(self) -> None:
        # The server's clock read 65.000 at some time within the 2 ms of the call.
        first = (65_000, 1_000.0, 1_000.002)
        assert self.observed(first).instant(65_010) == pytest.approx(1_000.0105)
        second = (65_001, 1_000.0011, 1_000.0013)  # 65.001 had passed by 1000.0013
        for later in ((), ((65_002, 1_000.002, 1_000.402),)):
            clock = self.observed(first, second, *later)
            assert clock.instant(65_000) == pytest.approx(999.9997, abs=1e-6)

    def test_clock_drift_is_followed(self) -> None:
        clock = ServerClock()
        for second in range(1_000):
            now = 1_000.0 + second
            theirs = now * (1 + 40e-6)
            clock.observe(int(theirs * 1e3), now - 0.0001, now + 0.0001)
            if second > 100:
                assert clock.instant(int(theirs * 1e3)) == pytest.approx(now, abs=0.0015)

    def test_a_clock_step_is_followed_immediately(self) -> None:
        clock = self.observed((3_665_000, 1_000.0, 1_000.001))
        for set_to_ms, sent in ((65_000, 1_001.0), (7_265_000, 1_002.0)):
            clock.observe(set_to_ms, sent, sent + 0.001)
            assert clock.instant(set_to_ms) == pytest.approx(sent)
        assert [step.by_ms for step in clock.steps] == pytest.approx([-3_601_000, 7_199_000], abs=2)
        # Just before detection, by the new clock.
        assert [step.since_ms for step in clock.steps] == pytest.approx([63_999, 7_263_999], abs=2)

    def test_what_is_not_a_step(self) -> None:
        first = (65_000, 1_000.0, 1_000.001)
        for read_ms, later in (
            # The server was stopped, then answered; or its reply was late.
            (66_000, [(73_000, 1_001.0, 1_008.5), (66_000, 1_001.0, 1_008.5)]),
            (66_200, [(66_200, 1_001.0, 1_001.001)]),  # leases tolerate such a change
        ):
            clock = self.observed(first, *later)
            assert clock.steps == ()
            assert clock.instant(read_ms) == pytest.approx(1_001.0, abs=0.002)
        clock = self.observed(first, (3_666_000, 1_001.0, 1_001.002))
        clock.observe(66_001, 1_001.001, 1_001.0015)  # answered before the step, observed after it
        assert [step.by_ms > 0 for step in clock.steps] == [True]
        assert clock.instant(3_667_000) == pytest.approx(1_002.0, abs=0.003)
