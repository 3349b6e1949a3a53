"""Forks processes from one that has imported everything: 10 ms each instead of 300."""

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.servers import PATIENCE

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.faults.kill_roles"])
LOCK = threading.Lock()
"""Each start of a process looks for ended ones; two that find the same one disagree on its end."""


class Child:
    """One forked process that runs `kill_roles.run(order)`, with its output in `order["output"]`.

    It ends with the tests' process.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._process = FORKS.Process(target=_live, args=(order,))
        with LOCK:
            self._process.start()

    @property
    def status(self) -> int | None:
        """None while it runs; else its exit code, or the negative number of a signal."""
        with LOCK:
            return self._process.exitcode

    def wait(self) -> int:
        wait([self._process.sentinel], PATIENCE.total_seconds())
        status = self.status
        assert status is not None, f"process {self._process.pid} does not end"
        return status

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid or 0, number)


def _live(order: dict[str, Any]) -> None:
    from tests.faults import kill_roles

    threading.Thread(target=_end_with_parent, daemon=True).start()
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(output, target)
    os.chdir(Path(order["output"]).parent)
    kill_roles.run(order)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
