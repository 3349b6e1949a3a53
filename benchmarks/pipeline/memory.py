"""How much memory a Spark driver and its workers take together."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

__all__ = ["Peak"]

LOOK_EVERY_S = 0.5
SERVERS = ("valkey", "redis")
"""Processes whose names begin so are the server, which is not counted."""


class Peak:
    """The most that this process and all below it held at one time, in MiB.

    Pages that processes share (workers are forked) count once: it is the sum of the kernel's
    proportional set sizes.
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
        while not self._ended.wait(LOOK_EVERY_S):
            self.mib = max(self.mib, sum(map(_held_mib, _family(os.getpid()))))


def _family(pid: int) -> list[int]:
    """A process and all below it, servers left out."""
    found, children = [pid], []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(one) for one in task.read_text("ascii").split()]
        except OSError:  # a thread that has ended meanwhile
            continue
    for child in children:
        try:
            name = Path(f"/proc/{child}/comm").read_text("ascii")
        except OSError:
            continue
        if not name.startswith(SERVERS):
            found += _family(child)
    return found


def _held_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
