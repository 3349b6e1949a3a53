"""The small parts: troubles, the server's clock, jobs, loops, status pages and logs."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa.core import logs
from lisa.core.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.status import HEALTH, StatusServer, health_page
from lisa.manager.jobs import Jobs
from lisa.manager.loop import Loop
from lisa.manager.server_clock import ServerClock
from lisa.manager.troubles import FIRST_PAUSE_S, LONGEST_PAUSE_S, Troubles
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lisa.manager.loop import Outcome


class TestTroubles:
    def test_pauses_grow_to_a_bound_and_start_again(self) -> None:
        troubles = Troubles("test")
        pauses = [troubles.failed("a", LisaError("no")) for _ in range(20)]
        assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
        assert pauses[-1] == LONGEST_PAUSE_S
        assert troubles.failed("b", LisaError("no")) == FIRST_PAUSE_S
        troubles.passed("a")
        assert troubles.of("a") is None
        assert troubles.failed("a", LisaError("no")) == FIRST_PAUSE_S

    def test_each_change_of_state_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        troubles = Troubles("test")
        for said in ("one", "one", "two", "two"):
            troubles.failed("a", LisaError(said))
        troubles.passed("a")
        troubles.passed("a")
        told = [record.getMessage() for record in caplog.records]
        assert told == [
            "test: topic a: one; trying again",
            "test: topic a: two; trying again",
            "test: topic a works again",
        ]

    def test_what_somebody_else_tells_is_not_repeated(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        troubles = Troubles("test")
        troubles.failed("a", ServerUnavailable("away"), quietly=True)
        troubles.passed("a")
        assert caplog.records == []


class TestServerClock:
    def test_the_bounds_middle_is_what_it_goes_by(self) -> None:
        clock = ServerClock()
        sent = 1_000.0
        # Redis's clock came to 65.000 within the 2 ms of the call, and not to 65.001 before it.
        clock.witness(65_000, sent, sent + 0.002)
        assert clock.instant(65_010) == pytest.approx(sent + (0.002 - 0.001) / 2 + 0.010)

    def test_bounds_that_overlap_narrow_it_and_looser_ones_change_nothing(self) -> None:
        clock = ServerClock()
        clock.witness(65_000, 1_000.0, 1_000.002)
        clock.witness(65_001, 1_000.0011, 1_000.0013)  # 65.001 was over by 1000.0013
        middle = 1_000.0003 + (1_000.0011 - 0.002 - 1_000.0003) / 2
        assert clock.instant(65_000) == pytest.approx(middle, abs=1e-6)
        clock.witness(65_002, 1_000.002, 1_000.402)
        assert clock.instant(65_000) == pytest.approx(middle, abs=1e-6)

    def test_a_clock_that_was_set_is_followed_at_once(self) -> None:
        clock = ServerClock()
        clock.witness(3_665_000, 1_000.0, 1_000.001)
        for set_to_ms in (65_000, 7_265_000):
            clock.witness(set_to_ms, 1_001.0, 1_001.001)
            assert clock.instant(set_to_ms) == pytest.approx(1_001.0)

    def test_clocks_that_go_apart_are_followed(self) -> None:
        clock = ServerClock()
        for second in range(1_000):
            now = 1_000.0 + second
            theirs = now * (1 + 40e-6)
            clock.witness(int(theirs * 1e3), now - 0.0001, now + 0.0001)
            if second > 100:
                assert clock.instant(int(theirs * 1e3)) == pytest.approx(now, abs=0.0015)


class Script:
    """A service that answers as it is told, and remembers what it was asked."""

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


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    made: list[Loop] = []
    yield made
    for loop in made:
        loop.stop()


class TestLoop:
    def run(self, loops: list[Loop], service: Script, **options: int) -> tuple[Loop, list[str]]:
        reachable, suspected = threading.Event(), list[str]()
        reachable.set()
        loop = Loop(
            "test", service, reachable=reachable, suspect=lambda: suspected.append("!"), **options
        )
        loops.append(loop)
        loop.start()
        return loop, suspected

    def test_one_topics_error_stops_no_other(
        self, loops: list[Loop], caplog: pytest.LogCaptureFixture
    ) -> None:
        service = Script({"bad": LisaError("no"), "worse": RuntimeError("oh")})
        loop, suspected = self.run(loops, service)
        for topic in ("bad", "worse", "good"):
            loop.agenda.add(topic)
        wait_until(lambda: "good" in service.asked)
        wait_until(lambda: service.asked.count("worse") >= 2)
        assert loop.alive
        assert suspected == []
        assert loop.troubles.of("bad") == "no"
        assert service.asked.count("good") == 1  # it said None: not again unless hurried

    def test_a_server_that_seems_away_is_reported(self, loops: list[Loop]) -> None:
        loop, suspected = self.run(loops, Script({"a": ServerUnavailable("gone")}))
        loop.agenda.add("a")
        wait_until(lambda: suspected)

    def test_nothing_runs_while_the_server_is_away_and_stop_does_not_wait(
        self, loops: list[Loop]
    ) -> None:
        service = Script({})
        loop, _ = self.run(loops, service)
        loop._reachable.clear()
        loop.agenda.add("a")
        time.sleep(0.05)
        assert service.asked == []
        began = time.monotonic()
        loop.stop()
        assert time.monotonic() - began < 1.0
        assert service.asked == []


class TestJobs:
    def test_an_error_of_one_topic_never_stops_the_next(self) -> None:
        reachable, seen = threading.Event(), list[str]()
        reachable.set()
        jobs = Jobs(reachable, lambda: None, lambda: ["a", "b", "c"])

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

    def test_a_slow_job_holds_up_no_other_and_no_tick_piles_up(self) -> None:
        reachable, quick, slow = threading.Event(), list[float](), list[float]()
        reachable.set()
        jobs = Jobs(reachable, lambda: None, list)

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
        assert slow[1] - slow[0] >= 0.35  # never beside itself
        assert len([at for at in quick if slow[0] <= at <= slow[1]]) >= 2

    def test_a_schedule_that_cannot_be_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="61"):
            Jobs(threading.Event(), lambda: None, list).add("x", "61 * * * * ?", lambda: None)


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

    def test_an_address_that_is_taken_is_a_clear_error(self) -> None:
        with StatusServer("127.0.0.1:0", {}) as server:
            address = f"127.0.0.1:{server.port}"
            with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address"):
                StatusServer(address, {}).start()

    @pytest.mark.parametrize("address", ["8088", ":80", "localhost", "h:x", "h:70000"])
    def test_no_address(self, address: str) -> None:
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
    def test_text_is_a_line_a_record(self) -> None:
        stream = io.StringIO()
        logs.configure("text", "info", stream=stream)
        logging.getLogger("lisa.x").info("hello %s", "you")
        logging.getLogger("lisa.x").debug("unheard")
        time_, level, *rest = stream.getvalue().split()
        assert (level, rest) == ("INFO", ["lisa.x:", "hello", "you"])
        assert time_.endswith("Z")

    def test_json_carries_extras_and_tracebacks(self) -> None:
        stream = io.StringIO()
        logs.configure("json", "debug", stream=stream)
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("lisa.x").exception("failed", extra={"topic": "orders"})
        record = json.loads(stream.getvalue())
        assert (record["level"], record["message"], record["topic"]) == (
            "error", "failed", "orders",
        )  # fmt: skip
        assert "ValueError: boom" in record["error"]

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
