"""A server for one measurement, with its CPU time and memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from lisa.embedded import EmbeddedServer


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
