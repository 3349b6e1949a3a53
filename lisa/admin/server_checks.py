"""Checks of a server's own report of itself, the reply to INFO."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

MEMORY_IN_USE = 0.9


class CheckResult(StrEnum):
    """The result of a check. FAIL means that messages may be lost or not delivered."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `cure` is the suggested fix, empty for OK."""

    name: str
    verdict: CheckResult
    found: str
    cure: str = ""

    @classmethod
    def ok(cls, name: str, found: str) -> Self:
        """A check that found no problem."""
        return cls(name, CheckResult.OK, found)

    @classmethod
    def warn(cls, name: str, found: str, cure: str) -> Self:
        """A check that found a problem which loses no messages."""
        return cls(name, CheckResult.WARN, found, cure)

    @classmethod
    def fail(cls, name: str, found: str, cure: str) -> Self:
        """A check that found a problem which may lose messages."""
        return cls(name, CheckResult.FAIL, found, cure)


def check_server(server: dict[str, str]) -> list[Check]:
    """Check version, role, persistence and memory. `server` holds the fields of INFO."""
    return [_version(server), _role(server), *_persistence(server), *_memory(server)]


def _version(server: dict[str, str]) -> Check:
    if "valkey_version" in server:
        return Check.ok("server", f"Valkey {server['valkey_version']}")
    return Check.ok("server", f"Redis {server.get('redis_version', '?')}")


def _role(server: dict[str, str]) -> Check:
    if server.get("role", "master") != "master":
        return Check.fail(
            "role", "a read-only replica", "use the primary's address, or redis+sentinel://"
        )
    return Check.ok("role", f"primary, {server.get('connected_slaves', '0')} replicas")


def _persistence(server: dict[str, str]) -> list[Check]:
    if server.get("aof_enabled") == "1":
        checks = [Check.ok("persistence", "append-only file")]
        if server.get("aof_last_write_status", "ok") != "ok":
            checks.append(
                Check.fail(
                    "persistence",
                    "the last write to the file failed",
                    "check the server's log and its disk",
                )
            )
        return checks
    if server.get("rdb_last_bgsave_status", "ok") != "ok":
        return [
            Check.fail(
                "persistence", "the last snapshot failed", "check the server's log and its disk"
            )
        ]
    return []


def _memory(server: dict[str, str]) -> list[Check]:
    limit, policy = int(server.get("maxmemory", 0)), server.get("maxmemory_policy", "noeviction")
    cure = "CONFIG SET maxmemory-policy noeviction, and add it to the server's configuration"
    if policy == "noeviction":
        checks = [Check.ok("maxmemory-policy", policy)]
    elif policy.startswith("volatile-"):
        checks = [
            Check.warn("maxmemory-policy", f"{policy}: settled ids may be forgotten early", cure)
        ]
    else:
        checks = [Check.fail("maxmemory-policy", f"{policy}: messages may be evicted", cure)]
    used = int(server.get("used_memory", 0))
    if limit and used > limit * MEMORY_IN_USE:
        checks.append(
            Check.warn(
                "memory",
                f"{used * 100 // limit} % of maxmemory in use",
                "raise maxmemory, or wait until consumers reduce the backlog",
            )
        )
    else:
        of = f" of {limit >> 20} MiB" if limit else ", no maxmemory"
        checks.append(Check.ok("memory", f"{used >> 20} MiB in use{of}"))
    return checks
