"""Is the server fit for a queue? Each check says what it found, and what to change."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lisa.admin import roles
from lisa.admin.acl import every_command, rights_of
from lisa.admin.probes import refused
from lisa.admin.reading import info
from lisa.core import scripts
from lisa.core.clock import human
from lisa.core.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.flow import Command, Flow
from lisa.core.store import SCHEMA_VERSION, Store
from lisa.core.transitions.inspect import Inspect

__all__ = ["Check", "Verdict", "examine"]

ROLE = "operator"
"""Whose rights the doctor, a command like others, is run with."""
_WRITABLE = ("role", "cluster")
CLOCK_OFFSET_MS = 1_000
MEMORY_IN_USE = 0.9


class Verdict(StrEnum):
    """How a check ended. Only FAIL means that messages may be lost or cannot flow."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was found, and the cure where one is needed."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""


def examine(store: Store) -> Flow[list[Check]]:
    """Run all checks. Raises ServerUnavailable and, for a wrong password, ConfigError."""
    yield from store.command("PING")
    server = yield from _info(store)
    if server is None:
        checks = [Check("rights", Verdict.WARN, "INFO is not permitted to this user",
                        "allow +info, so that the other checks can be made")]  # fmt: skip
    else:
        checks = [
            _version(server), _role(server), *_persistence(server), *_memory(server),
            *(yield from _cluster(store, server)),
        ]  # fmt: skip
    # What cannot write keeps every write waiting for a better time: not asked then.
    writes = all(one.verdict is not Verdict.FAIL for one in checks if one.name in _WRITABLE)
    # A cluster's client shapes the reply of COMMAND INFO for itself; there the probes tell.
    listed = server is None or server.get("cluster_enabled") != "1"
    for check in (
        _clock, *([_commands] if listed else []), _ranges,
        *([_permissions, _layout] if writes else []), _keys, _scripts, _managers,
    ):  # fmt: skip
        checks.append((yield from check(store)))
    return checks


def _info(store: Store) -> Flow[dict[str, str] | None]:
    reply = yield from _try(store, ("INFO",))
    return None if isinstance(reply, LisaError) else info(reply)


def _try(store: Store, command: Command) -> Flow[Any]:
    """A command's reply, or the error that it was refused with."""
    try:
        return (yield from store.command(*command))
    except ServerUnavailable as error:
        yield from store.command("PING")  # silence ends it all; out of memory is an answer
        return error
    except LisaError as error:
        return error


def _version(server: dict[str, str]) -> Check:
    if "valkey_version" in server:
        return Check("server", Verdict.OK, f"Valkey {server['valkey_version']}")
    return Check("server", Verdict.OK, f"Redis {server.get('redis_version', '?')}")


def _role(server: dict[str, str]) -> Check:
    if server.get("role", "master") != "master":
        return Check("role", Verdict.FAIL, "a read-only replica",
                     "name the primary, or use redis+sentinel://")  # fmt: skip
    return Check("role", Verdict.OK, f"primary, {server.get('connected_slaves', '0')} replicas")


def _persistence(server: dict[str, str]) -> list[Check]:
    if server.get("aof_enabled") == "1":
        checks = [Check("persistence", Verdict.OK, "append-only file")]
        if server.get("aof_last_write_status", "ok") != "ok":
            checks.append(Check("persistence", Verdict.FAIL, "the last write to the file failed",
                                "look at the server's log and its disk"))  # fmt: skip
        return checks
    if server.get("rdb_last_bgsave_status", "ok") != "ok":
        return [Check("persistence", Verdict.FAIL, "the last snapshot failed",
                      "look at the server's log and its disk")]  # fmt: skip
    return []


def _memory(server: dict[str, str]) -> list[Check]:
    limit, policy = int(server.get("maxmemory", 0)), server.get("maxmemory_policy", "noeviction")
    cure = "CONFIG SET maxmemory-policy noeviction, and write it into the server's configuration"
    if policy == "noeviction":
        checks = [Check("maxmemory-policy", Verdict.OK, policy)]
    elif policy.startswith("volatile-"):
        checks = [Check("maxmemory-policy", Verdict.WARN,
                        f"{policy}: settled ids may be forgotten early", cure)]  # fmt: skip
    else:
        checks = [Check("maxmemory-policy", Verdict.FAIL, f"{policy}: messages may be evicted",
                        cure)]  # fmt: skip
    used = int(server.get("used_memory", 0))
    if limit and used > limit * MEMORY_IN_USE:
        checks.append(Check("memory", Verdict.WARN, f"{used * 100 // limit} % of maxmemory in use",
                            "raise maxmemory, or let consumers work it off"))  # fmt: skip
    else:
        of = f" of {limit >> 20} MiB" if limit else ", no maxmemory"
        checks.append(Check("memory", Verdict.OK, f"{used >> 20} MiB in use{of}"))
    return checks


def _cluster(store: Store, server: dict[str, str]) -> Flow[list[Check]]:
    checks = []
    if server.get("aof_enabled") != "1":
        checks.append((yield from _snapshots(store)))
    if server.get("cluster_enabled") != "1":
        return checks
    reply = yield from _try(store, ("CLUSTER", "INFO"))
    if isinstance(reply, LisaError):
        checks.append(Check("cluster", Verdict.WARN, "CLUSTER INFO is not permitted",
                            "allow +cluster|info"))  # fmt: skip
        return checks
    fields = reply if isinstance(reply, dict) else info(reply)
    state = fields.get("cluster_state", "?")
    good = state == "ok"
    checks.append(Check("cluster", Verdict.OK if good else Verdict.FAIL,
                        f"state {state}, {fields.get('cluster_size', '?')} primaries",
                        "" if good else "cover all slots: see CLUSTER SLOTS"))  # fmt: skip
    return checks


def _snapshots(store: Store) -> Flow[Check]:
    """Whether there are snapshots at least, without an append-only file."""
    reply = yield from _try(store, ("CONFIG", "GET", "save"))
    cure = "CONFIG SET appendonly yes, and write it into the server's configuration"
    if isinstance(reply, LisaError):
        return Check(
            "persistence",
            Verdict.WARN,
            "no append-only file; whether there are snapshots cannot be seen",
            cure,
        )
    value = next(iter(reply.values())) if isinstance(reply, dict) else (reply or [b"", b""])[1]
    if value:
        return Check(
            "persistence",
            Verdict.WARN,
            "snapshots only: a crash loses what was sent since the last one",
            cure,
        )
    return Check("persistence", Verdict.FAIL, "none: a restart loses every message", cure)


def _clock(store: Store) -> Flow[Check]:
    before = time.time_ns()
    server_us = yield from store.server_time_us()
    middle_us = (before + time.time_ns()) // 2_000
    offset_ms = (server_us - middle_us) / 1_000
    found = f"{offset_ms:+.1f} ms against this machine"
    if abs(offset_ms) < CLOCK_OFFSET_MS:
        return Check("clock", Verdict.OK, found)
    return Check("clock", Verdict.WARN, f"{human(round(abs(offset_ms)))} apart: {found}",
                 "let NTP set both clocks; messages are due by the server's")  # fmt: skip


def _commands(store: Store) -> Flow[Check]:
    names = every_command()
    reply = yield from _try(store, ("COMMAND", "INFO", *names))
    if isinstance(reply, LisaError):
        return Check("commands", Verdict.WARN, "COMMAND INFO is not permitted", "allow +command")
    missing = [name for name, one in zip(names, reply, strict=True) if not one]
    if missing:
        return Check("commands", Verdict.FAIL, f"missing: {', '.join(missing)}",
                     "use Redis 6.2 or newer, or Valkey; look for rename-command")  # fmt: skip
    return Check("commands", Verdict.OK, f"all {len(names)} are there")


def _ranges(store: Store) -> Flow[Check]:
    """Exclusive stream ranges are an argument, not a command: tried rather than looked up."""
    key = store.keys.topic("lisa.doctor").group("lisa").ready
    reply = yield from _try(store, ("XRANGE", key, "(0-1", "+", "COUNT", 1))
    if isinstance(reply, LisaError) and "nvalid stream ID" in str(reply):
        return Check("stream ranges", Verdict.FAIL, "no exclusive ranges",
                     "use Redis 6.2 or newer, or Valkey")  # fmt: skip
    return Check("stream ranges", Verdict.OK, "exclusive ranges work")


def _permissions(store: Store) -> Flow[Check]:
    """What the command line itself needs; `lisa acl` says what the other roles do."""
    rights = rights_of([ROLE])
    lacking = yield from refused(store, rights)
    if lacking:
        return Check("rights", Verdict.FAIL, f"refused: {', '.join(lacking)}",
                     f"grant what `lisa acl {ROLE}` prints: {' '.join(f'+{x}' for x in lacking)}"
                     f" on ~{store.keys.prefix}:* and &{store.keys.wake}")  # fmt: skip
    return Check("rights", Verdict.OK, f"all {len(rights)} of the {ROLE}")


def _keys(store: Store) -> Flow[Check]:
    """A script that reads keys of a topic: rights on scripts and on the keys' pattern."""
    try:
        yield from store.run(Inspect("lisa.doctor", ["none"]))
    except ServerUnavailable:
        raise
    except LisaError as error:
        return Check("scripts", Verdict.FAIL, str(error),
                     f"grant what `lisa acl {ROLE}` prints")  # fmt: skip
    return Check("scripts", Verdict.OK, "scripts run on a topic's keys")


def _layout(store: Store) -> Flow[Check]:
    try:
        yield from store.check_schema()
    except ServerUnavailable as error:
        return Check("layout", Verdict.FAIL, str(error), "see the checks above")
    except ConfigError as error:
        return Check("layout", Verdict.FAIL, str(error), "upgrade, or use another prefix")
    return Check("layout", Verdict.OK, f"version {SCHEMA_VERSION}, prefix {store.keys.prefix}")


def _scripts(store: Store) -> Flow[Check]:
    shas = [scripts.load(name).sha for name in scripts.names()]
    reply = yield from _try(store, ("SCRIPT", "EXISTS", *shas))
    if isinstance(reply, LisaError):
        return Check("script cache", Verdict.WARN, "SCRIPT EXISTS is not permitted",
                     "allow +script|exists")  # fmt: skip
    return Check(
        "script cache",
        Verdict.OK,
        f"{sum(map(bool, reply))} of {len(shas)} loaded; the rest come on first use",
    )


def _managers(store: Store) -> Flow[Check]:
    try:
        alive = [one for one in (yield from roles.managers(store)) if one.alive]
    except ConfigError as error:
        return Check("managers", Verdict.WARN, str(error), "grant reading to this user")
    if not alive:
        return Check("managers", Verdict.WARN, "none is alive: nothing falls due",
                     "start one: lisa-manager")  # fmt: skip
    return Check("managers", Verdict.OK, f"{len(alive)} alive")
