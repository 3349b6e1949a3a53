"""Runs a peer: its worker process and its sending commands."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bench.ledger import Ledger
from benchmarks.bench.results import Fault
from benchmarks.bench.server import BenchServer
from benchmarks.bench.work import tree_cpu_seconds
from benchmarks.comparison.environments import Installed, end_group

READY_S = 60.0
END_S = 15.0
SETTLE_S = 0.3


class Senders:
    """The sending commands of a peer on one server."""

    def __init__(self, installed: Installed, server: BenchServer, slowest: float) -> None:
        self._installed = installed
        self._slowest = slowest
        self._environ = {"BENCH_REDIS_URL": server.url, "BENCH_LEDGER": "/nonexistent"}

    def seconds(self, command: str, count: int, *arguments: str) -> float | None:
        """Run a sending command; returns its own timing, or None if the peer lacks the command."""
        answer = self._installed.call(
            command,
            "--count",
            str(count),
            *arguments,
            timeout_s=READY_S + count / self._slowest,
            BENCH_COUNT=str(count),
            **self._environ,
        )
        if not answer:
            return None
        if answer.get("sent") != count:
            raise Fault(f"{command} sent {answer.get('sent')} of {count}")
        return max(float(answer["seconds"]), 1e-6)


class PeerAtWork:
    """A running peer. See `work.AtWork`."""

    def __init__(
        self, installed: Installed, server: BenchServer, folder: Path, expected: int, slowest: float
    ) -> None:
        self.server = server
        self.ledger = Ledger(folder)
        self.slowest = slowest
        self._senders = Senders(installed, server, slowest)
        self._output, self._errors = folder / "work.out", folder / "work.err"
        environ = installed.environ(
            BENCH_REDIS_URL=server.url, BENCH_LEDGER=str(folder), BENCH_COUNT=str(expected)
        )
        watch = (sys.executable, "-m", "lisa.embedded.parent_watch", str(END_S))
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                (*watch, *installed.command("work")),
                cwd=installed.peer.folder,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until the workers accept jobs."""
        deadline = time.monotonic() + READY_S
        while "ready" not in self._output.read_text(errors="replace").split():
            if time.monotonic() > deadline:
                raise Fault(f"the workers were not ready within {READY_S:.0f} s")
            self.check()
            time.sleep(0.05)

    def send(self, count: int, due_ms: int) -> float:
        """See `work.AtWork`."""
        return self._senders.seconds("send", count, "--due-ms", str(due_ms)) or 0.0

    def send_paced(self, count: int, start_ms: int, rate: float) -> float:
        """See `work.AtWork`."""
        paced = ("--start-ms", str(start_ms), "--rate", f"{rate:.3f}")
        return self._senders.seconds("send-paced", count, *paced) or 0.0

    def cpu_seconds(self) -> dict[str, float]:
        """See `work.AtWork`."""
        return {"consumer": tree_cpu_seconds(self._process.pid)}

    def settled(self) -> bool:
        """See `work.AtWork`. Peers do not report this, so wait for a moment."""
        time.sleep(SETTLE_S)
        return True

    def check(self) -> None:
        """See `work.AtWork`."""
        if (code := self._process.poll()) is not None:
            last = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
            raise Fault(f"the worker exited with {code}: {' '.join(last)}")

    def stop(self) -> None:
        """Stop the workers and kill remaining processes."""
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: it is a PIPE
        self._process.stdin.close()
        try:
            self._process.wait(END_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_group(self._process.pid)


@contextmanager
def peer_at_work(
    installed: Installed, server: BenchServer, expected: int, slowest: float
) -> Iterator[PeerAtWork]:
    """Run a peer's workers; `slowest` is a lower bound of their messages per second."""
    with TemporaryDirectory(prefix="lisa-bench-") as folder:
        work = PeerAtWork(installed, server, Path(folder), expected, slowest)
        try:
            work.wait_ready()
            yield work
        finally:
            work.stop()
