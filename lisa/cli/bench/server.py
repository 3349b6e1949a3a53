"""A server for one measurement, and what it tells of its own processor time and memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from lisa.embedded import EmbeddedServer

__all__ = ["Server", "client", "debian_binary", "fresh_server"]


def client(url: str) -> Any:
    """A plain redis-py client with its hiredis parser, for the floor and for INFO.

    Any: redis-py types the replies of its blocking and its asyncio client as one wide union.
    """
    return redis.Redis.from_url(url)


def debian_binary() -> Path | None:
    """The redis-server on PATH, if there is one."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


class Server:
    """An empty server without persistence."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = client(url)

    def cpu_us(self) -> float:
        """Microseconds of processor time that it has used so far, user and system."""
        told: dict[str, Any] = self.client.info("cpu")
        return float(told["used_cpu_user"] + told["used_cpu_sys"]) * 1e6

    def memory(self) -> int:
        """Bytes that its allocator has given out."""
        return int(self.client.info("memory")["used_memory"])

    def calls(self) -> dict[str, int]:
        """How often each command was called so far, also by scripts."""
        told: dict[str, Any] = self.client.info("commandstats")
        return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in told.items()}

    def knows(self, command: str) -> bool:
        """Whether it has a command, asked by calling it without any arguments."""
        try:
            self.client.execute_command(command)
        except redis.ResponseError as error:
            return "unknown command" not in str(error)
        return True

    def describe(self) -> dict[str, str]:
        """Its name, version and persistence."""
        told: dict[str, Any] = self.client.info("server")
        name, number = "Redis", told["redis_version"]
        if "valkey_version" in told:
            name, number = "Valkey", told["valkey_version"]
        settings: dict[str, str] = self.client.config_get("save", "appendonly")
        snapshots = settings["save"] or "none"
        return {
            "server": f"{name} {number}",
            "allocator": str(self.client.info("memory")["mem_allocator"]),
            "persistence": f"snapshots {snapshots}, append-only file {settings['appendonly']}",
        }


@contextmanager
def fresh_server(binary: Path | None = None) -> Iterator[Server]:
    """An empty server, the embedded one unless another is named; ended at the end."""
    with EmbeddedServer(binary=binary) as embedded:
        server = Server(embedded.url)
        try:
            yield server
        finally:
            server.client.close()
