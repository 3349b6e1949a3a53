"""The status pages, the log and the temporary files of a daemon."""

import io
import json
import logging
import math
import os
import tempfile
from datetime import UTC, datetime
from unittest.mock import Mock

import httpx
import pytest

from lisa.core.daemon import logs, processes
from lisa.core.daemon.status import HEALTH, StatusResponse, StatusServer, health_page
from lisa.core.model.errors import ConfigError

log = logging.getLogger("lisa.x")


def test_pages_are_served_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    report = {"status": "ok"}

    def fail() -> StatusResponse:
        raise ValueError("broken page")

    pages = {HEALTH: lambda: health_page(report), "/metrics": fail}
    with StatusServer("127.0.0.1:0", pages) as server:
        address = f"127.0.0.1:{server.port}"

        def fetch(path: str, method: str = "GET") -> tuple[int, bytes]:
            answer = httpx.request(method, f"http://{address}{path}", timeout=60)
            return answer.status_code, answer.content

        assert fetch("/healthz?x=1") == (200, b'{"status":"ok"}\n')
        assert fetch("/healthz", "HEAD") == (200, b"")
        assert fetch("/etc/passwd")[0] == 404
        assert fetch("/healthz", "POST")[0] == 501
        report["status"] = "failing"
        assert fetch("/healthz")[0] == 503
        assert fetch("/metrics") == (500, b"unexpected error; see the log\n")
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address"):
            StatusServer(address, {}).start()
    assert "broken page" in caplog.text
    for invalid in (":80", "localhost", "h:x", "h:70000"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            StatusServer(invalid, {})


class Stream(io.StringIO):
    """The output of the root logger."""

    def getvalue(self) -> str:
        logging.getLogger().handlers[0].flush()
        return super().getvalue()


@pytest.fixture
def stream() -> io.StringIO:
    return Stream()


@pytest.mark.parametrize("password", ["s3cr3t@p", "p/s3cr3t"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_passwords_in_urls_are_never_written(
    stream: io.StringIO, form: logs.LogFormat, password: str
) -> None:
    """Not even in a URL that is refused, because its password is not percent-encoded."""
    logs.configure(form, "info", stream=stream)
    url = f"redis://user:{password}@host:6379/0"
    try:
        raise ValueError(f"cannot reach {url}")
    except ValueError:
        log.exception("no %s", url, extra={"server": url, "all": [{url: ValueError(url)}]})
    assert "s3cr3t" not in stream.getvalue()
    assert "redis://***@host:6379/0" in stream.getvalue()


def test_logs_as_text_and_as_json(stream: io.StringIO) -> None:
    """JSON has extras, tracebacks, and bytes that are not text."""
    logs.configure("text", "info", stream=stream)
    log.info("hello %s", "you")
    log.debug("unheard")
    time, level, *rest = stream.getvalue().split()
    assert (level, rest, time[-1]) == ("INFO", ["lisa.x:", "hello", "you"], "Z")
    stream.truncate(0)
    stream.seek(0)
    logs.configure("json", "debug", stream=stream)
    name = os.fsdecode(b"caf\xe9")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("no file %s", name, extra={"topic": "orders", "names": [name]})
    record = json.loads(stream.getvalue())
    assert (record["level"], record["message"]) == ("error", f"no file {name}")
    assert (record["topic"], record["names"]) == ("orders", [name])
    assert "ValueError: boom" in record["error"]


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def nested(levels: int) -> list[object]:
    return [nested(levels - 1)] if levels else []


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (CYCLE, "..."),
        (nested(500), "..."),
        (Unprintable(), "<Unprintable>"),
        ({1: {2}}, {"1": [2]}),
        ({"n": 10**30, "f": math.nan}, {"n": 10**30, "f": "nan"}),
        (datetime(2030, 1, 1, tzinfo=UTC), "2030-01-01T00:00:00+00:00"),
    ],
    ids=["cycle", "deep", "no text", "keys and sets", "large and none", "time"],
)
def test_a_value_that_cannot_be_written_does_not_harm_its_line(
    stream: io.StringIO, value: object, written: object
) -> None:
    logs.configure("json", stream=stream)
    log.info("order %s", "o-1", extra={"value": value, "level": "gold", "error": 7})
    record = json.loads(stream.getvalue())
    assert (record["level"], record["message"]) == ("info", "order o-1")
    assert (record["extra_level"], record["extra_error"]) == ("gold", 7)
    found = record["value"]
    while isinstance(found, list) and found and isinstance(found[0], list | str):
        found = found[0]
    assert found == written


def test_a_line_that_cannot_be_formatted_is_replaced(stream: io.StringIO) -> None:
    logs.configure("text", stream=stream)
    log.info("order %s", Unprintable())
    assert "cannot write a line of lisa.x: RuntimeError('no text')" in stream.getvalue()


def test_a_log_that_nobody_reads_blocks_no_thread() -> None:
    """Further lines are dropped and counted, and the log says so once it is read."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, os.fdopen(reader) as read:
        logs.configure("text", stream=pipe)
        before = logs.dropped_lines()
        for number in range(logs.MOST_LINES + 2000):  # a pipe takes fewer than these 2000
            log.info("line %d", number)
        dropped = logs.dropped_lines() - before
        assert dropped
        for _ in range(logs.MOST_LINES // 2):
            read.readline()
        log.info("read again")
        lines = [next(read)]
        while "read again" not in lines[-1]:
            lines.append(next(read))
    said = [int(line.split()[3]) for line in lines if "lines were dropped" in line]
    assert sum(said) == dropped


def test_temporary_files_are_in_memory_where_all_else_is_read_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert processes.writable_folder() == tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=FileNotFoundError))
    assert processes.writable_folder() == processes.MEMORY
    monkeypatch.setattr(processes, "MEMORY", "/nonexistent")
    with pytest.raises(ConfigError, match="TMPDIR"):
        processes.writable_folder()
