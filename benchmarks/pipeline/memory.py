"""Measures the memory of a Spark driver and its workers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

POLL_S = 0.5
SERVERS = ("valkey", "redis")
"""Name prefixes of server processes, which are not counted."""


class Peak:
    """The peak memory of this process and its descendants, in MiB.

    Uses the sum of the kernel's proportional set sizes, which counts shared pages once.
    """

    def __init__(self) -> None:
        self.mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self.mib = max(self.mib, sum(map(_held_mib, _process_tree(os.getpid()))))


def _process_tree(pid: int) -> list[int]:
    """A process and its descendants, without servers."""
    found, children = [pid], []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(one) for one in task.read_text("ascii").split()]
        except OSError:  # the thread has ended
            continue
    for child in children:
        try:
            name = Path(f"/proc/{child}/comm").read_text("ascii")
        except OSError:
            continue
        if not name.startswith(SERVERS):
            found += _process_tree(child)
    return found


def _held_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
