"""Forks processes from one that has imported everything: 10 ms each instead of 300.

`Nursery` is the tests' side. The other side is this module run as a program: it reads orders (JSON
lines) from its standard input, forks a child for each, and reports started and ended children on
its standard output. Children end with the program, and it ends with its standard input.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.servers import PATIENCE, ROOT


class Child:
    """One forked process."""

    def __init__(self) -> None:
        self.pid = 0
        self._ended = threading.Event()
        self.status: int | None = None

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def end_as(self, status: int) -> None:
        """Record the end: an exit code, or the negative number of a signal."""
        self.status = status
        self._ended.set()

    def wait(self, timeout_s: float = PATIENCE.total_seconds()) -> int:
        """Wait until the process ends; its exit code or signal."""
        assert self._ended.wait(timeout_s), f"process {self.pid} does not end"
        assert self.status is not None
        return self.status

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Nursery:
    """The tests' side."""

    def __init__(self) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.kill_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._born: list[Child] = []
        self._children: dict[int, Child] = {}
        self._told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, order: dict[str, Any]) -> Child:
        """Run `kill_roles.run(**order)` in a child, with its output in the file `output`."""
        assert self._popen.stdin is not None
        child = Child()
        with self._told:
            self._born.append(child)
            self._popen.stdin.write(json.dumps(order) + "\n")
            self._popen.stdin.flush()
            assert self._told.wait_for(lambda: child.pid, PATIENCE.total_seconds())
        return child

    def end(self) -> None:
        """End the program and all its children."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(PATIENCE.total_seconds())
        self._reader.join()
        self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            what, pid, status = line.split()
            with self._told:
                if what == "born":
                    child = self._children[int(pid)] = self._born.pop(0)
                    child.pid = int(pid)
                    self._told.notify_all()
                else:
                    self._children.pop(int(pid)).end_as(int(status))


def main() -> None:
    """The program's side."""
    from tests.faults import kill_roles

    kill_roles.load()
    gc.collect()
    gc.freeze()
    waker, wakes = os.pipe()
    for end in (waker, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    try:
        for line in _orders(waker, living):
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(waker)
                os.close(wakes)
                _live(json.loads(line))
            living.add(pid)
            _tell("born", pid, 0)
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _orders(waker: int, living: set[int]) -> Any:
    """Yield lines of the standard input; meanwhile, report ended children."""
    pending = b""
    while True:
        ready, _, _ = select.select([0, waker], [], [])
        if waker in ready:
            with suppress(BlockingIOError):
                os.read(waker, 4096)
            _reap(living)
        if 0 in ready:
            some = os.read(0, 65_536)
            if not some:
                return
            *lines, pending = (pending + some).split(b"\n")
            yield from lines


def _reap(living: set[int]) -> None:
    for pid in list(living):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            living.discard(pid)
            _tell("ended", pid, os.waitstatus_to_exitcode(status))


def _tell(what: str, pid: int, status: int) -> None:
    os.write(1, f"{what} {pid} {status}\n".encode())


def _live(order: dict[str, Any]) -> None:
    """Run the child; never returns."""
    from tests.faults import kill_roles

    code = 1
    try:
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        os.chdir(Path(order["output"]).parent)
        kill_roles.run(order)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(bool(left.code))
    except BaseException:  # noqa: BLE001  told, and the code says so
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
