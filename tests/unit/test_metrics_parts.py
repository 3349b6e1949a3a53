from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import sys
import threading
import time
import types
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import lisa
from lisa.core.metrics import cache
from lisa.core.metrics.cache import Reading
from lisa.core.metrics.families import FAMILIES
from lisa.core.metrics.numbers import Numbers, Spread, Tally, add, lasting, merge, of_process, put
from lisa.core.metrics.page import metrics_page
from lisa.core.metrics.sharing import Shared, leave_numbers
from lisa.core.model.errors import ServerUnavailable
from lisa.gateway.access import EVERYTHING
from lisa.gateway.limits_middleware import LimitsMiddleware
from lisa.gateway.request_metrics import Meter, face_of, set_failure_reason, waits
from tests.exposition import Exposed
from tests.servers import ROOT, wait_until

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = "lisa_consumer_handler_seconds"
HANDLED = "lisa_consumer_handled_total"
BUSY = "lisa_consumer_busy"


def shown(numbers: Numbers, accept: str = "") -> Exposed:
    return Exposed(metrics_page("consumer", [numbers], accept).body.decode())


def test_a_histogram_is_shown_as_prometheus_wants_it() -> None:
    spread = Spread(FAMILIES[SECONDS].bounds)
    values = [random.expovariate(20) for _ in range(500)] + [0.001, 0.0025, 5000.0]
    for value in values:
        spread.observe(value)
    page = shown({SECONDS: {("t", "g"): spread.numbers()}})
    labels = {"topic": "t", "group": "g"}
    for bound in (*FAMILIES[SECONDS].bounds, math.inf):
        le = "+Inf" if bound == math.inf else str(bound)
        below = sum(value <= bound for value in values)
        assert page.value(f"{SECONDS}_bucket", **labels, le=le) == below
    assert page.value(f"{SECONDS}_count", **labels) == len(values)
    assert page.value(f"{SECONDS}_sum", **labels) == pytest.approx(sum(values))


def test_labels_are_escaped_and_read_back() -> None:
    topic = 'a"b\\c\nd{},='
    page = shown({BUSY: {(): 1}, HANDLED: {(topic, "g", "ok"): 3}})
    assert page.value(HANDLED, topic=topic, group="g", outcome="ok") == 3
    assert page.value("lisa_build_info", role="consumer", version=lisa.__version__) == 1


def test_the_client_can_read_the_format() -> None:
    plain = metrics_page("gateway", [{HANDLED: {("t", "g", "ok"): 3}}], "text/plain")
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    newer = metrics_page("gateway", [{HANDLED: {("t", "g", "ok"): 3}}], asked)
    assert newer.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert newer.body.endswith(b"# EOF\n")


def test_processes_are_summed_and_the_least_up_counts() -> None:
    one: Numbers = {"lisa_up": {(): 1.0}, BUSY: {(): 2}, SECONDS: {("t", "g"): [1, 0, 2, 0.5]}}
    two: Numbers = {"lisa_up": {(): 0.0}, BUSY: {(): 3}, SECONDS: {("t", "g"): [0, 4, 0, 1.5]}}
    assert merge([one, two]) == {
        "lisa_up": {(): 0.0},
        BUSY: {(): 5},
        SECONDS: {("t", "g"): [1, 4, 2, 2.0]},
    }
    assert lasting(one) == {SECONDS: {("t", "g"): [1, 0, 2, 0.5]}}
    with pytest.raises(TypeError, match=SECONDS):
        add(one, SECONDS, 1.0, "t", "g")


def test_tallies_count_on_threads() -> None:
    tally = Tally()
    tally.add(2, "a")
    tally.add(3, "a")
    tally.add(0, "b")
    assert tally.numbers() == {("a",): 5, ("b",): 0}


def test_process_metrics() -> None:
    numbers = of_process()
    assert numbers["lisa_processes"] == {(): 1}
    if sys.platform == "linux":
        assert 5e6 < numbers["lisa_process_resident_memory_bytes"][()] < 1e10  # type: ignore[operator]


CHILD = """
import sys, time
from pathlib import Path
from lisa.core.metrics.sharing import Shared
shared = Shared(Path(sys.argv[1]))
shared.tidy()
shared.write(lambda: {"lisa_consumer_handled_total": {("t", "g", "ok"): 7},
                      "lisa_consumer_busy": {(): 1}})
print("left", flush=True)
time.sleep(60)
"""


def test_counters_of_a_killed_process_stay_and_its_gauges_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared(tmp_path)
    shared.write(lambda: {HANDLED: {("t", "g", "ok"): 5}, BUSY: {(): 2}})
    for round_ in (1, 2):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"left\n"
            assert shared.read() == {HANDLED: {("t", "g", "ok"): 5 + 7 * round_}, BUSY: {(): 3}}
        finally:
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]
        if round_ == 1:
            shared.tidy()  # as the next child does
            assert shared.read() == {HANDLED: {("t", "g", "ok"): 12}, BUSY: {(): 2}}
    assert len(list(tmp_path.glob("*.numbers"))) == 2
    # Not merged yet, but not updated for too long.
    monkeypatch.setattr("lisa.core.metrics.sharing.GONE_AFTER_S", -1.0)
    assert shared.read() == {HANDLED: {("t", "g", "ok"): 19}}
    shared.tidy()
    assert [path.name for path in tmp_path.glob("*.numbers")] == [f"{os.getpid()}.numbers"]
    assert shared.read() == {HANDLED: {("t", "g", "ok"): 19}}


def test_empty_numbers_do_not_replace_earlier_ones(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    shared.write(lambda: {HANDLED: {("t", "g", "ok"): 5}})
    shared.write(dict)
    assert shared.read() == {HANDLED: {("t", "g", "ok"): 5}}


def test_numbers_are_written_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lisa.core.metrics.sharing.WRITE_EACH_S", 0.005)
    told = iter(range(1, 1_000_000))
    directory = tmp_path / "family"
    directory.mkdir()
    leave_numbers(directory, lambda: {BUSY: {(): next(told)}})
    wait_until(lambda: Shared(directory).read().get(BUSY, {}).get((), 0) > 3)  # type: ignore[operator]
    directory.rename(tmp_path / "elsewhere")
    wait_until(lambda: "lisa-numbers" not in {thread.name for thread in threading.enumerate()})


def test_a_reading_lasts_and_a_slow_one_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reading = Reading()
    assert reading.get() is None
    kept = reading.keep({"lisa_topics": {(): 3}}, began=now - 0.01)
    assert kept["lisa_up"] == {(): 1.0}
    now += cache.LASTS_S * 0.99
    assert reading.get() is kept
    now += cache.LASTS_S * 0.02
    assert reading.get() is None
    reading.keep({}, began=now - 0.1)
    now += 0.1 * cache.SHARE - 0.1
    assert reading.get() is not None
    now += 0.2
    assert reading.get() is None
    reading.keep({}, began=now - 60.0)
    now += cache.LASTS_AT_MOST_S
    assert reading.get() is None
    gone = reading.keep(ServerUnavailable("away"), began=now)
    assert gone == {"lisa_up": {(): 0.0}}


@pytest.mark.parametrize(
    ("path", "face"),
    [
        ("/v1/topics/x/messages", "native"),
        ("/v1", "native"),
        ("/v10", "page"),
        ("/camellia/health/status", "camellia"),
        ("/mykit/push", "mykit"),
        ("/delay-queue/pop/t", "delay-queue"),
        ("/metrics", "metrics"),
        ("/healthz", "health"),
        ("/", "page"),
        ("/../../etc/passwd", "page"),
    ],
)
def test_faces(path: str, face: str) -> None:
    assert face_of(path) == face


def request(path: str = "/v1/x", method: str = "GET") -> dict[str, object]:
    return {"type": "http", "path": path, "method": method}


def test_requests_are_counted_by_outcome() -> None:
    meter = Meter()
    answered = meter.begin()
    answered.starts({"status": 201, "headers": [(b"content-type", b"application/json")]})
    meter.end(request(method="POST"), answered)
    meter.end(request(method="BREW"), meter.begin())  # the client left
    for reason in ("bytes", None):
        refused = meter.begin()
        if reason:
            set_failure_reason(reason)
        refused.starts({"status": 503})
        meter.end(request(), refused)
    numbers = meter.numbers()
    assert numbers["lisa_gateway_requests_total"] == {
        ("native", "POST", "201"): 1,
        ("native", "other", "499"): 1,
        ("native", "GET", "503"): 2,
    }
    assert numbers["lisa_gateway_refused_total"] == {
        ("requests",): 0,
        ("bytes",): 1,
        ("waiting",): 0,
        ("server",): 1,
    }
    assert sum(numbers["lisa_gateway_request_seconds"]["native",][:-1]) == 4  # type: ignore[index]


def test_waiting_requests_are_counted_but_not_timed() -> None:
    meter = Meter()
    pull, stream = request(), request()
    waits(pull)
    meter.end(pull, meter.begin())
    answer = meter.begin()
    answer.starts(
        {"status": 200, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}
    )
    meter.end(stream, answer)
    numbers = meter.numbers()
    assert sum(numbers["lisa_gateway_requests_total"].values()) == 2  # type: ignore[arg-type]
    assert "lisa_gateway_request_seconds" not in numbers


def test_metrics_are_loaded_on_the_first_scrape() -> None:
    program = (
        "import sys; import lisa, lisa.cli.main, lisa.cli.consumer, lisa.cli.manager; "
        "lisa.Consumer, lisa.Manager, lisa.Producer; "
        "import lisa.manager.daemon, lisa.consumer.consumer; "
        "print('prometheus_client' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "False\n"


def test_put_replaces() -> None:
    numbers: Numbers = {}
    put(numbers, BUSY, 1)
    put(numbers, BUSY, 2)
    assert numbers == {BUSY: {(): 2}}


def test_a_fault_counts_as_500_and_not_as_a_client_that_left() -> None:
    bounds = types.SimpleNamespace(
        max_requests=9,
        max_buffered_bytes=99,
        max_body_bytes=9,
        request_timeout=timedelta(seconds=9),
    )
    hub: Any = types.SimpleNamespace(
        settings=types.SimpleNamespace(gateway_server=bounds),
        meter=Meter(),
        active=0,
        held=0,
        stalled=0,
        buffered=0,
        token=lambda _connection, *, compat: EVERYTHING,
        access=types.SimpleNamespace(is_open=False),
    )
    sent: list[Any] = []

    async def broken(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ZeroDivisionError

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/topics", "headers": []}
    asyncio.run(LimitsMiddleware(broken, hub)(scope, receive, send))
    assert sent[0]["status"] == 500
    assert (b"x-frame-options", b"DENY") in sent[0]["headers"]
    assert hub.meter.numbers()["lisa_gateway_requests_total"] == {("native", "GET", "500"): 1}
    assert hub.active == hub.buffered == 0
