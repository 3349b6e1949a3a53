"""CPU time of other processes."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc/self/stat").exists()
"""Whether /proc exists: on Linux, not on macOS."""


def tree_cpu_seconds(root: int) -> float:
    """User and system time of a process and its running descendants, in seconds."""
    return sum(cpu_seconds(pid) for pid in descendants(root))


def descendants(root: int) -> list[int]:
    """The pids of a process and all its descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process in seconds; 0 if the process does not exist."""
    if PROC:
        try:
            # The id of the process's CPU clock, as in clock_getcpuclockid(3). /proc/PID/stat has
            # a resolution of 10 ms only.
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
                continue  # the process has ended
            # "PID (NAME) STATE PARENT ..."; NAME may contain any character.
            found.append((int(entry.name), int(stat.rpartition(")")[2].split()[1])))
    return found


def _ps_seconds(pid: int) -> float:
    shown = _ps("-p", str(pid), "-o", "time=").strip()
    total = 0.0
    for part in shown.replace("-", ":").split(":") if shown else ():
        total = total * 60 + float(part)
    return total


def _ps(*arguments: str) -> str:
    command = ("/bin/ps", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
