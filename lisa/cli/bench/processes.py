"""Processor time of other processes."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from pathlib import Path

__all__ = ["cpu_seconds", "descendants", "tree_cpu_seconds"]

PROC = Path("/proc/self/stat").exists()
"""Linux, as opposed to macOS."""


def tree_cpu_seconds(root: int) -> float:
    """User and system time of a process and of all that descend from it and still run."""
    return sum(cpu_seconds(pid) for pid in descendants(root))


def descendants(root: int) -> list[int]:
    """A process and its children, theirs, and so on."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, all its threads; 0 if it has gone."""
    if PROC:
        try:
            # The process's own CPU clock, in nanoseconds: clock_getcpuclockid(3) makes its number
            # so. /proc/PID/stat counts in ticks of 10 ms.
            return time.clock_gettime((~pid << 3) | 2)
        except OSError:
            return 0.0
    return _ps_seconds(pid)


def _parents() -> list[tuple[int, int]]:
    if not PROC:
        listed = _ps("-A", "-o", "pid=,ppid=")
        return [(int(pid), int(parent)) for pid, parent in map(str.split, listed.splitlines())]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            # "PID (NAME) STATE PARENT ...", and a name may hold anything.
            found.append((int(entry.name), int(stat.rpartition(")")[2].split()[1])))
    return found


def _ps_seconds(pid: int) -> float:
    told = _ps("-p", str(pid), "-o", "time=").strip()
    total = 0.0
    for part in told.replace("-", ":").split(":") if told else ():
        total = total * 60 + float(part)
    return total


def _ps(*arguments: str) -> str:
    command = ("/bin/ps", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
