"""The status pages and the log of a daemon."""

import io
import json
import logging
import os

import httpx
import pytest

from lisa.core.daemon import logs
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


@pytest.fixture
def stream() -> io.StringIO:
    """The output of the root logger."""
    return io.StringIO()


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
