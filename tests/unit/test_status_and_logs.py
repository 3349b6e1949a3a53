"""The status pages and the log of a daemon."""

from __future__ import annotations

import io
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from lisa.core.daemon import logs
from lisa.core.daemon.status import HEALTH, StatusResponse, StatusServer, health_page
from lisa.core.model.errors import ConfigError

log = logging.getLogger("lisa.x")


def fetch(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_pages_are_served_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    report = {"status": "ok"}

    def fail() -> StatusResponse:
        raise ValueError("broken page")

    pages = {HEALTH: lambda: health_page(report), "/metrics": fail}
    with StatusServer("127.0.0.1:0", pages) as server:
        assert fetch(server.port, "/healthz?x=1") == (200, b'{"status":"ok"}\n')
        assert fetch(server.port, "/healthz", "HEAD") == (200, b"")
        assert fetch(server.port, "/etc/passwd")[0] == 404
        assert fetch(server.port, "/healthz", "POST")[0] == 501
        report["status"] = "failing"
        assert fetch(server.port, "/healthz")[0] == 503
        assert fetch(server.port, "/metrics") == (500, b"unexpected error; see the log\n")
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address"):
            StatusServer(address, {}).start()
    assert "broken page" in caplog.text


@pytest.mark.parametrize("address", [":80", "localhost", "h:x", "h:70000"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        StatusServer(address, {})


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The output of the root logger."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = before
    root.setLevel(level)


def test_text_logs_have_one_line_per_record(stream: io.StringIO) -> None:
    logs.configure("text", "info", stream=stream)
    log.info("hello %s", "you")
    log.debug("unheard")
    time, level, *rest = stream.getvalue().split()
    assert (level, rest) == ("INFO", ["lisa.x:", "hello", "you"])
    assert time.endswith("Z")


def test_json_logs_have_extras_tracebacks_and_bytes_that_are_not_text(stream: io.StringIO) -> None:
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


@pytest.mark.parametrize("form", ["text", "json"])
def test_passwords_in_urls_are_never_written(stream: io.StringIO, form: logs.LogFormat) -> None:
    logs.configure(form, "info", stream=stream)
    url = "redis://user:s3cr3t@p@host:6379/0"
    try:
        raise ValueError(f"cannot reach {url}")
    except ValueError:
        log.exception("no %s", url, extra={"server": url})
    assert "s3cr3t" not in stream.getvalue()
    assert "redis://***@host:6379/0" in stream.getvalue()
