"""Real gateway processes for tests."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.servers import ROOT, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

_ADDRESS = re.compile(r"lisa-gateway: (http://\S+/)")


def new_topic(stem: str = "t") -> str:
    """A topic that no other test uses: gateways live longer than one test."""
    return f"{stem}-{secrets.token_hex(4)}"


class Gateway:
    """`lisa-gateway` on a free port; `client` is an httpx client for it.

    `config` is YAML text; `arguments` go to the command line.
    """

    def __init__(
        self,
        redis_url: str,
        *arguments: str,
        config: str = "",
        directory: Path | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "lisa.cli.gateway", "--redis", redis_url, "--port", "0"]
        if config:
            assert directory is not None, "a configuration needs a directory to stand in"
            file = directory / f"gateway-{secrets.token_hex(3)}.yml"
            file.write_text(config, encoding="utf-8")
            command += ["--config", str(file)]
        self._headers = dict(headers or {})
        self.client = httpx.Client()
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env={**os.environ, **(env or {})},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        found = next(match for line in self.said if (match := _ADDRESS.search(line)))
        return found[1].rstrip("/")

    def __enter__(self) -> Self:
        try:
            self._wait_until_up()
        except BaseException:
            self.end()
            raise
        return self

    def _wait_until_up(self) -> None:
        def is_up() -> bool:
            assert self.process.poll() is None, "\n".join(self.said)
            return any(_ADDRESS.search(line) for line in self.said)

        wait_until(is_up)
        self.client = httpx.Client(base_url=self.url, headers=self._headers, timeout=30.0)

        def answers() -> bool:
            assert self.process.poll() is None, "\n".join(self.said)
            try:
                return self.client.get("/healthz").status_code in (200, 503)
            except httpx.TransportError:
                return False

        wait_until(answers)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        code = self.process.wait(30)
        self._reader.join(5)
        return code

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Whatever happened: leave nothing behind."""
        self.client.close()
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        if self.process.stderr is not None:
            self._reader.join(5)
            self.process.stderr.close()
