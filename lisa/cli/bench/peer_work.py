"""A peer at work: its worker process, and its senders, each a process that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lisa.cli.bench.fault import Fault
from lisa.cli.bench.ledger import Ledger
from lisa.cli.bench.peers import Installed, end_group
from lisa.cli.bench.processes import tree_cpu_seconds
from lisa.cli.bench.server import Server

__all__ = ["PeerAtWork", "Senders", "peer_at_work"]

READY_S = 60.0
END_S = 15.0
SETTLE_S = 0.3


class Senders:
    """A peer's sending commands on one server; each gives messages a second."""

    def __init__(self, installed: Installed, server: Server, slowest: float) -> None:
        self._installed = installed
        self._slowest = slowest
        self._environ = {"BENCH_REDIS_URL": server.url, "BENCH_LEDGER": "/nonexistent"}

    def seconds(self, command: str, count: int, *arguments: str) -> float | None:
        """How long sending took, by the sender's own clock; None: it has no such command."""
        answer = self._installed.call(
            command, "--count", str(count), *arguments,
            timeout_s=READY_S + count / self._slowest, BENCH_COUNT=str(count), **self._environ,
        )  # fmt: skip
        if not answer:
            return None
        if answer.get("sent") != count:
            raise Fault(f"{command} sent {answer.get('sent')} of {count}")
        return max(float(answer["seconds"]), 1e-6)


class PeerAtWork:
    """See `work.AtWork`."""

    def __init__(
        self, installed: Installed, server: Server, folder: Path, expected: int, slowest: float
    ) -> None:
        self.server = server
        self.ledger = Ledger(folder)
        self.slowest = slowest
        self._senders = Senders(installed, server, slowest)
        self._said, self._complaints = folder / "work.out", folder / "work.err"
        environ = installed.environ(
            BENCH_REDIS_URL=server.url, BENCH_LEDGER=str(folder), BENCH_COUNT=str(expected)
        )
        leash = (sys.executable, "-m", "lisa.embedded.leash", str(END_S))
        with self._said.open("wb") as said, self._complaints.open("wb") as complaints:
            self._process = subprocess.Popen(
                (*leash, *installed.command("work")), cwd=installed.peer.folder, env=environ,
                stdin=subprocess.PIPE, stdout=said, stderr=complaints, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until its workers take jobs."""
        deadline = time.monotonic() + READY_S
        while "ready" not in self._said.read_text(errors="replace").split():
            if time.monotonic() > deadline:
                raise Fault(f"its workers were not ready within {READY_S:.0f} s")
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
        """See `work.AtWork`: how that shows differs, so a peer is given a moment."""
        time.sleep(SETTLE_S)
        return True

    def check(self) -> None:
        """See `work.AtWork`."""
        if (code := self._process.poll()) is not None:
            words = self._complaints.read_text(errors="replace").strip().splitlines()[-1:]
            raise Fault(f"its worker ended with {code}: {' '.join(words)}")

    def stop(self) -> None:
        """End it, and whatever it left behind."""
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
    installed: Installed, server: Server, expected: int, slowest: float
) -> Iterator[PeerAtWork]:
    """A peer's workers, ready for jobs; `slowest` is what they surely handle a second."""
    with TemporaryDirectory(prefix="lisa-bench-") as folder:
        work = PeerAtWork(installed, server, Path(folder), expected, slowest)
        try:
            work.wait_ready()
            yield work
        finally:
            work.stop()
