"""The small parts: errors, the server's clock, jobs, loops, status pages and logs."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from lisa.core.daemon import logs
from lisa.core.daemon.status import HEALTH, StatusResponse, StatusServer, health_page
from lisa.core.model.backoff import FIRST_S, LONGEST_S
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.model.sharding import Shard
from lisa.core.transitions.promote import Promoted
from lisa.manager.expirer import Expirer
from lisa.manager.jobs import Jobs
from lisa.manager.loop import PUT_OFF_S, Loop, Outcome
from lisa.manager.promoter import FAST_INTERVAL_S, Promoter, PromotionPace
from lisa.manager.server_clock import ServerClock
from lisa.manager.server_monitor import Node, ProbeResult, ServerMonitor
from lisa.manager.topic_errors import TopicErrors
from lisa.manager.topic_search import TopicSearch
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import tzinfo

    from lisa.core.store.store import SyncStore
    from lisa.manager.loop import Outcome
    from lisa.manager.nodes import Nodes
    from lisa.manager.registry import Registry
    from lisa.manager.signal_queue import SignalQueue


class OneAnswer:
    """A store whose scripts always return the same."""

    def __init__(self, answer: Promoted) -> None:
        self._answer = answer

    def call(self, _call: object) -> Promoted:
        return self._answer

    def known_groups(self, _topic: str) -> tuple[str, ...]:
        return ("lisa",)


class HastyClock(ServerClock):
    """A clock by which every message is due already."""

    def instant(self, _ms: int) -> float:
        return time.monotonic()


class TestPromoter:
    @pytest.mark.parametrize(("interval_ms", "least_s"), [(0, 0.0), (500, 0.4)])
    def test_the_interval_holds_although_the_next_message_is_due(
        self, interval_ms: int, least_s: float
    ) -> None:
        answer = Promoted(1, (), 1_001, 1_000, False, False, interval_ms, 1, [], [])
        store = cast("SyncStore", OneAnswer(answer))
        expirer = Expirer(store, cast("SignalQueue", None))
        before = time.monotonic()
        (at,) = Promoter(store, HastyClock(), expirer, lambda _: 1).step(["orders"])
        assert isinstance(at, float)
        assert before - 0.1 + least_s < at <= time.monotonic() + 0.1 + least_s

    @pytest.mark.parametrize(
        ("messages", "interval_ms", "wait_s"),
        [(1, 0, 0.0), (3, 0, FAST_INTERVAL_S), (1, 50, 0.05), (3, 1, 0.001)],
    )
    def test_only_fast_topics_wait_without_an_interval_of_their_own(
        self, messages: int, interval_ms: int, wait_s: float
    ) -> None:
        pace = PromotionPace()
        for ms in range(500):
            pace.record(messages, interval_ms, ms / 1000)
        assert pace.earliest - 0.499 == pytest.approx(wait_s)

    def test_a_pause_ends_the_waits_of_a_fast_topic(self) -> None:
        pace = PromotionPace()
        for ms in range(500):
            pace.record(3, 0, ms / 1000)
        pace.record(3, 0, 10.0)
        assert pace.earliest == 10.0


class TestTopicErrors:
    def test_pauses_grow_to_a_limit_and_reset_after_success(self) -> None:
        errors = TopicErrors("test")
        pauses = [errors.failed("a", LisaError("no")) for _ in range(20)]
        assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
        assert pauses[-1] == LONGEST_S
        assert errors.failed("b", LisaError("no")) == FIRST_S
        errors.passed("a")
        assert errors.of("a") is None
        assert errors.failed("a", LisaError("no")) == FIRST_S

    def test_each_change_of_state_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        errors = TopicErrors("test")
        for said in ("one", "one", "two", "two"):
            errors.failed("a", LisaError(said))
        errors.passed("a")
        errors.passed("a")
        told = [record.getMessage() for record in caplog.records]
        assert told == [
            "test: topic a: one; trying again",
            "test: topic a: two; trying again",
            "test: topic a works again",
        ]

    def test_quiet_failures_are_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        errors = TopicErrors("test")
        errors.failed("a", ServerUnavailable("away"), quietly=True)
        errors.passed("a")
        assert caplog.records == []


class TestNode:
    def test_it_answers_while_the_next_probe_runs(self) -> None:
        seen: list[bool] = []

        class Monitor:
            reply: ProbeResult | None = ProbeResult(
                back=False,
                first=False,
                another_run=False,
                emptied=False,
                uptime_s=1.0,
                gap_s=1.0,
                promoted=False,
            )

            def step(self) -> ProbeResult | None:
                seen.append(node.answers)
                return self.reply

        monitor = Monitor()
        node = Node("", cast("ServerMonitor", monitor), lambda *_: None, 60.0)
        node.probe()
        node.probe()
        monitor.reply = None
        node.probe()
        assert seen == [False, True, True]
        assert not node.answers


class TestServerClock:
    def test_the_estimate_is_the_middle_of_the_bounds(self) -> None:
        clock = ServerClock()
        sent = 1_000.0
        # Redis's clock read 65.000 at some time within the 2 ms of the call.
        clock.observe(65_000, sent, sent + 0.002)
        assert clock.instant(65_010) == pytest.approx(sent + (0.002 - 0.001) / 2 + 0.010)

    def test_overlapping_bounds_narrow_the_estimate(self) -> None:
        clock = ServerClock()
        clock.observe(65_000, 1_000.0, 1_000.002)
        clock.observe(65_001, 1_000.0011, 1_000.0013)  # 65.001 had passed by 1000.0013
        middle = 1_000.0003 + (1_000.0011 - 0.002 - 1_000.0003) / 2
        assert clock.instant(65_000) == pytest.approx(middle, abs=1e-6)
        clock.observe(65_002, 1_000.002, 1_000.402)
        assert clock.instant(65_000) == pytest.approx(middle, abs=1e-6)

    def test_a_clock_step_is_followed_immediately(self) -> None:
        clock = ServerClock()
        clock.observe(3_665_000, 1_000.0, 1_000.001)
        for set_to_ms, sent in ((65_000, 1_001.0), (7_265_000, 1_002.0)):
            clock.observe(set_to_ms, sent, sent + 0.001)
            assert clock.instant(set_to_ms) == pytest.approx(sent)
        back, forward = clock.steps
        assert back.by_ms == pytest.approx(-3_601_000, abs=2)
        assert 63_998 <= back.since_ms <= 64_001  # just before detection, by the new clock
        assert forward.by_ms == pytest.approx(7_199_000, abs=2)
        assert 7_263_998 <= forward.since_ms <= 7_264_001

    def test_a_slow_reply_is_not_a_step(self) -> None:
        clock = ServerClock()
        clock.observe(65_000, 1_000.0, 1_000.001)
        clock.observe(73_000, 1_001.0, 1_008.5)  # the server was stopped, then answered
        clock.observe(66_000, 1_001.0, 1_008.5)  # or answered immediately, but the reply was late
        assert clock.steps == ()
        assert clock.instant(66_000) == pytest.approx(1_001.0, abs=0.002)

    def test_contradicting_concurrent_calls_are_not_a_step(self) -> None:
        clock = ServerClock()
        clock.observe(65_000, 1_000.0, 1_000.001)
        clock.observe(3_666_000, 1_001.0, 1_001.002)
        clock.observe(66_001, 1_001.001, 1_001.0015)  # answered before the step, observed after it
        assert [step.by_ms > 0 for step in clock.steps] == [True]
        assert clock.instant(3_667_000) == pytest.approx(1_002.0, abs=0.003)

    def test_a_change_that_leases_tolerate_is_not_a_step(self) -> None:
        clock = ServerClock()
        clock.observe(65_000, 1_000.0, 1_000.001)
        clock.observe(66_200, 1_001.0, 1_001.001)
        assert clock.steps == ()
        assert clock.instant(66_200) == pytest.approx(1_001.0, abs=0.002)

    def test_clock_drift_is_followed(self) -> None:
        clock = ServerClock()
        for second in range(1_000):
            now = 1_000.0 + second
            theirs = now * (1 + 40e-6)
            clock.observe(int(theirs * 1e3), now - 0.0001, now + 0.0001)
            if second > 100:
                assert clock.instant(int(theirs * 1e3)) == pytest.approx(now, abs=0.0015)


class Script:
    """A service with scripted answers that records its calls."""

    def __init__(self, answers: dict[str, Outcome | RuntimeError]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        self.asked += topics
        outcomes = [self.answers.get(topic) for topic in topics]
        for outcome in outcomes:
            if isinstance(outcome, RuntimeError):
                raise outcome
        return [one for one in outcomes if not isinstance(one, RuntimeError)]


class All:
    """All nodes; the topics in `away` are unavailable."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.suspected: list[str] = []
        self.is_any_available = True

    def is_available(self, topic: str) -> bool:
        return topic not in self.away

    def suspect(self, topic: str = "") -> None:
        self.suspected.append(topic)


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    made: list[Loop] = []
    yield made
    for loop in made:
        loop.stop()


class TestLoop:
    def run(self, loops: list[Loop], service: Script, **options: int) -> tuple[Loop, All]:
        nodes = All()
        loop = Loop("test", service, nodes=nodes, **options)
        loops.append(loop)
        loop.start()
        return loop, nodes

    def test_an_error_in_one_topic_does_not_stop_others(
        self, loops: list[Loop], caplog: pytest.LogCaptureFixture
    ) -> None:
        service = Script({"bad": LisaError("no"), "worse": RuntimeError("oh")})
        loop, nodes = self.run(loops, service)
        for topic in ("bad", "worse", "good"):
            loop.due_heap.add(topic)
        wait_until(lambda: "good" in service.asked)
        wait_until(lambda: service.asked.count("worse") >= 2)
        assert all(one.is_alive() for one in loop.threads())
        assert nodes.suspected == []
        assert loop.topic_errors.of("bad") == "no"
        assert service.asked.count("good") == 1  # it returned None: not scheduled again

    def test_an_unavailable_server_is_reported(self, loops: list[Loop]) -> None:
        loop, nodes = self.run(loops, Script({"a": ServerUnavailable("gone")}))
        loop.due_heap.add("a")
        wait_until(lambda: nodes.suspected)
        assert set(nodes.suspected) == {"a"}

    def test_nothing_runs_while_the_server_is_away_and_stop_does_not_wait(
        self, loops: list[Loop]
    ) -> None:
        service = Script({})
        loop, nodes = self.run(loops, service)
        nodes.away.add("a")
        loop.due_heap.add("a")
        time.sleep(0.05)
        assert service.asked == []
        began = time.monotonic()
        loop.stop()
        assert time.monotonic() - began < PUT_OFF_S / 2
        assert service.asked == []

    def test_a_postponed_topic_runs_when_it_is_scheduled_now(self, loops: list[Loop]) -> None:
        service = Script({})
        loop, nodes = self.run(loops, service)
        nodes.away.add("a")
        for topic in ("a", "b"):
            loop.due_heap.add(topic)
        wait_until(lambda: service.asked == ["b"])
        nodes.away.clear()
        began = time.monotonic()
        loop.due_heap.schedule_now("a")
        wait_until(lambda: service.asked == ["b", "a"])
        assert time.monotonic() - began < PUT_OFF_S / 2


class TestJobs:
    def test_a_job_continues_after_an_error_in_one_topic(self) -> None:
        nodes, seen = All(), list[str]()
        nodes.away.add("d")
        jobs = Jobs(nodes, lambda _: [Shard("a"), Shard("b"), Shard("c"), Shard("d")])

        def work(topic: str) -> None:
            seen.append(topic)
            if topic == "b":
                raise LisaError("no")

        jobs.add_for_each("clean", timedelta(milliseconds=100), lambda page: page, work)
        jobs.start()
        try:
            wait_until(lambda: len(seen) >= 6)
        finally:
            jobs.stop()
        assert seen[:6] == ["a", "b", "c", "a", "b", "c"]

    def test_a_slow_job_delays_no_other_job_and_ticks_do_not_pile_up(self) -> None:
        quick, slow = list[float](), list[float]()
        jobs = Jobs(All(), lambda _: [])

        def dawdle() -> None:
            slow.append(time.monotonic())
            time.sleep(0.35)

        jobs.add("slow", timedelta(milliseconds=100), dawdle)
        jobs.add("quick", timedelta(milliseconds=100), lambda: quick.append(time.monotonic()))
        jobs.start()
        try:
            wait_until(lambda: len(slow) >= 2)
        finally:
            jobs.stop()
        assert slow[1] - slow[0] >= 0.35  # never concurrently with itself
        assert len([at for at in quick if slow[0] <= at <= slow[1]]) >= 2

    @pytest.mark.parametrize("step", [timedelta(hours=-1), timedelta(days=20_000)])
    def test_jobs_run_on_when_the_clock_is_set(
        self, monkeypatch: pytest.MonkeyPatch, step: timedelta
    ) -> None:
        set_by, runs = [timedelta()], Counter[str]()

        class SetClock(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + set_by[0]

        monkeypatch.setattr("apscheduler.schedulers.base.datetime", SetClock)
        monkeypatch.setattr("lisa.manager.job_scheduler.datetime", SetClock)
        jobs = Jobs(All(), lambda _: [])
        jobs.add("interval", timedelta(milliseconds=100), lambda: runs.update(["interval"]))
        jobs.add("cron", "0/1 * * * * ?", lambda: runs.update(["cron"]))
        jobs.start()
        try:
            wait_until(lambda: runs["interval"])
            set_by[0] = step
            before = runs.copy()
            wait_until(lambda: all(runs[name] > before[name] + 1 for name in ("interval", "cron")))
        finally:
            jobs.stop()

    def test_a_starting_scheduler_is_not_a_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[list[str]] = []

        class Slow(threading.Thread):
            def start(self) -> None:
                seen.append(jobs.faults())
                super().start()
                seen.append(jobs.faults())

        monkeypatch.setattr("apscheduler.schedulers.background.Thread", Slow)
        jobs = Jobs(All(), lambda _: [])
        jobs.add("x", timedelta(seconds=10), lambda: None)
        jobs.start()
        jobs.stop()
        assert seen == [[], []]

    def test_a_scheduler_that_has_ended_is_a_fault(self) -> None:
        jobs = Jobs(All(), lambda _: [])
        jobs.add("x", timedelta(seconds=10), lambda: None)
        jobs.start()
        assert jobs.faults() == []
        jobs._scheduler.shutdown()
        assert jobs.faults() == ["the scheduler's thread has ended"]

    def test_an_invalid_schedule_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="61"):
            Jobs(All(), lambda _: []).add("x", "61 * * * * ?", lambda: None)


def fetch(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class TestStatus:
    def test_health_is_served_and_nothing_else(self) -> None:
        report = {"status": "ok"}
        with StatusServer("127.0.0.1:0", {HEALTH: lambda: health_page(report)}) as server:
            assert fetch(server.port, "/healthz?x=1") == (200, b'{"status":"ok"}\n')
            assert fetch(server.port, "/healthz", "HEAD") == (200, b"")
            assert fetch(server.port, "/etc/passwd")[0] == 404
            assert fetch(server.port, "/healthz", "POST")[0] == 501
            report["status"] = "failing"
            assert fetch(server.port, "/healthz")[0] == 503

    def test_an_unexpected_error_of_a_page_is_logged_and_answered(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> StatusResponse:
            raise ValueError("broken page")

        with StatusServer("127.0.0.1:0", {"/metrics": fail}) as server:
            assert fetch(server.port, "/metrics") == (500, b"unexpected error; see the log\n")
        assert "broken page" in caplog.text

    def test_an_address_in_use_raises_a_clear_error(self) -> None:
        with StatusServer("127.0.0.1:0", {}) as server:
            address = f"127.0.0.1:{server.port}"
            with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address"):
                StatusServer(address, {}).start()

    @pytest.mark.parametrize("address", [":80", "localhost", "h:x", "h:70000"])
    def test_an_invalid_address_is_refused(self, address: str) -> None:
        with pytest.raises(ConfigError, match="HOST:PORT"):
            StatusServer(address, {})


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
class TestLogs:
    def test_text_logs_have_one_line_per_record(self) -> None:
        stream = io.StringIO()
        logs.configure("text", "info", stream=stream)
        logging.getLogger("lisa.x").info("hello %s", "you")
        logging.getLogger("lisa.x").debug("unheard")
        time_, level, *rest = stream.getvalue().split()
        assert (level, rest) == ("INFO", ["lisa.x:", "hello", "you"])
        assert time_.endswith("Z")

    def test_json_logs_include_extras_and_tracebacks(self) -> None:
        stream = io.StringIO()
        logs.configure("json", "debug", stream=stream)
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("lisa.x").exception("failed", extra={"topic": "orders"})
        record = json.loads(stream.getvalue())
        assert (record["level"], record["message"], record["topic"]) == (
            "error",
            "failed",
            "orders",
        )
        assert "ValueError: boom" in record["error"]

    def test_json_logs_keep_lines_with_bytes_that_are_not_text(self) -> None:
        stream = io.StringIO()
        logs.configure("json", "debug", stream=stream)
        name = os.fsdecode(b"caf\xe9")
        logging.getLogger("lisa.x").warning("no file %s", name, extra={"names": [name]})
        record = json.loads(stream.getvalue())
        assert (record["message"], record["names"]) == (f"no file {name}", [name])

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_passwords_in_urls_are_never_written(self, form: logs.LogFormat) -> None:
        stream = io.StringIO()
        logs.configure(form, "info", stream=stream)
        url = "redis://user:s3cr3t@p@host:6379/0"
        try:
            raise ValueError(f"cannot reach {url}")
        except ValueError:
            logging.getLogger("lisa.x").exception("no %s", url, extra={"server": url})
        assert "s3cr3t" not in stream.getvalue()
        assert "redis://***@host:6379/0" in stream.getvalue()


class CountedEvent(threading.Event):
    """An event that counts how often a thread began to wait for it."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return super().wait(timeout)


class TestTopicSearch:
    def test_closing_starts_no_further_search(self, monkeypatch: pytest.MonkeyPatch) -> None:
        searches: list[None] = []
        registry = SimpleNamespace(search=lambda: searches.append(None))
        nodes = SimpleNamespace(is_any_available=True)
        search = TopicSearch(cast("Registry", registry), cast("Nodes", nodes))
        is_due = CountedEvent()
        is_due.set()
        monkeypatch.setattr(search, "_is_due", is_due)
        search.start()
        wait_until(lambda: is_due.waits == 2)
        search.close()
        search.join(5.0)
        assert len(searches) == 1
