"""Real gateway processes for tests."""

import json
import os
import re
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx

from lisa import FoundMessage, Producer
from tests.servers import PATIENCE, ROOT, wait_until

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of `http:` URLs: by default, each would load all certificates, which takes 18 ms."""

_ADDRESS = re.compile(r"lisa-gateway: (http://\S+/)")


def new_topic(stem: str = "t") -> str:
    """A topic that no other test uses: gateways outlive single tests."""
    return f"{stem}-{secrets.token_hex(4)}"


def stored(producer: Producer, topic: str, message_id: str) -> FoundMessage:
    """A message that must be known."""
    found = producer.get(topic, message_id)
    assert found is not None, message_id
    return found


def state(producer: Producer, topic: str, message_id: str) -> str | None:
    """The state of a message; None if it is unknown."""
    found = producer.get(topic, message_id)
    return found.state if found else None


def declared_topic(client: httpx.Client) -> str:
    """A new topic with the group `g`."""
    topic = new_topic()
    assert client.post(f"/v1/topics/{topic}/groups", json={"group": "g"}).status_code == 201
    return topic


class Gateway:
    """`lisa-gateway` on a free port; `client` is an httpx client for it.

    `config` and `tokens` are YAML texts, for files in `directory` or a temporary one; `arguments`
    go to the command line, `ulimit` to the shell's command.
    """

    def __init__(
        self,
        redis_url: str,
        *arguments: str,
        config: str = "",
        tokens: str = "",
        directory: Path | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        ulimit: str = "",
    ) -> None:
        command = [sys.executable, "-m", "lisa.cli.gateway", "--redis", redis_url, "--port", "0"]
        self._directory = tempfile.TemporaryDirectory()
        for option, text in (("--config", config), ("--tokens-file", tokens)):
            if text:
                name = f"gateway{option}-{secrets.token_hex(3)}.yml"
                file = (directory or Path(self._directory.name)) / name
                file.write_text(text, encoding="utf-8")
                command += [option, str(file)]
        limited = ["sh", "-c", f'ulimit {ulimit}; exec "$@"', "sh"] if ulimit else []
        self._headers = dict(headers or {})
        self.client = httpx.Client(verify=NO_TLS)
        # A file contains what the process wrote before its response; from a pipe, it would arrive
        # later if this process is busy.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        self._ended: list[str] = []
        self.process = subprocess.Popen(
            [*limited, *command, *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stderr=self._output,
        )

    @property
    def said(self) -> list[str]:
        """The lines on stderr so far."""
        if self._output.closed:
            return self._ended
        file = self._output.fileno()
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        return text.splitlines()

    @property
    def url(self) -> str:
        """The gateway's URL, without a trailing slash."""
        found = next(match for line in self.said if (match := _ADDRESS.search(line)))
        return found[1].rstrip("/")

    def __enter__(self) -> Self:
        try:
            wait_until(self._is_up)
        except BaseException:
            self.end()
            raise
        return self

    def _is_up(self) -> bool:
        assert self.process.poll() is None, "\n".join(self.said)
        if not any(_ADDRESS.search(line) for line in self.said):
            return False
        self.client.close()
        self.client = httpx.Client(
            base_url=self.url, headers=self._headers, timeout=30.0, verify=NO_TLS
        )
        with suppress(httpx.TransportError):
            return self.client.get("/healthz").status_code in (200, 503)
        return False

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE.total_seconds())
        except subprocess.TimeoutExpired as error:
            said = "\n".join(self.said[-20:])
            raise AssertionError(f"the gateway does not stop: {said}") from error

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop the process in any case and leave nothing behind."""
        self.client.close()
        if self.process.poll() is None:
            try:
                self.stop()
            except AssertionError:
                self.process.kill()
                self.process.wait()
                raise
        self._ended = self.said
        self._output.close()
        self._directory.cleanup()


ACK_TIMEOUT_MS = 60_000
"""For a `RawPull`: a message redelivered only after this time would be far too late for a test."""


class RawPull:
    """A long poll over a plain socket, which can be closed in several ways."""

    def __init__(self, gateway: Gateway, topic: str) -> None:
        parts = urlsplit(gateway.url)
        body = json.dumps(
            {"wait_ms": 30_000, "ack_timeout_ms": ACK_TIMEOUT_MS, "group": "lisa"}
        ).encode()
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0))
        self._socket.sendall(
            b"POST /v1/topics/%s/pull HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s"
            % (topic.encode(), parts.netloc.encode(), len(body), body)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def answer(self) -> bytes:
        """The whole response: head and JSON."""
        self._socket.settimeout(20)
        found = b""
        while not found.endswith(b"}"):
            more = self._socket.recv(65_536)
            assert more, f"cut short: {found!r}"
            found += more
        return found

    def close(self, *, hard: bool) -> None:
        """Close with FIN, or with RST."""
        if hard:
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()
