"""Checks whether a server is configured for a queue, with a suggested fix for each problem."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lisa.admin import roles
from lisa.admin.acl import every_command, refused, rights_of, rules
from lisa.admin.roles import MOST_TOPICS, suspected_names
from lisa.admin.topics import counts
from lisa.core.model.clock import human
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.presence import (
    NO_HEARTBEATS,
    PROBE,
    first_refusal,
    loaders,
    write_refusal,
    write_trials,
)
from lisa.core.store.server_checks import (
    SUPPORTED,
    Check,
    CheckResult,
    check_clock,
    check_server,
    info,
    with_refusal,
    without_append_only_file,
    wrong_mode,
)
from lisa.core.store.store import SCHEMA_VERSION, Store, grouped
from lisa.core.transitions import loader
from lisa.core.transitions.inspect import Inspect

ROLE = "operator"
"""The role whose rights the doctor checks."""
_WRITABLE = ("server", "role", "cluster")


def examine(store: Store) -> Flow[list[Check]]:
    """Run all checks. Raises ServerUnavailable, and ConfigError for a wrong password."""
    yield from store.command("PING")
    answers = yield from store.on_each_node("INFO")
    servers = {node: info(reply) for node, reply in answers.items() if isinstance(reply, bytes)}
    if not servers:
        checks = [
            Check.warn(
                "rights",
                "INFO is not permitted to this user",
                "allow +info to enable the other checks",
            )
        ]
    else:
        for server in servers.values():
            wrong = wrong_mode(store.where, server)
            if wrong is not None:
                raise wrong
        by_node = {node: check_server(server) for node, server in servers.items()}
        for node, server in servers.items():
            if server.get("aof_enabled") != "1":
                by_node[node].append(without_append_only_file(server))
        checks = _worst(by_node)
    if store.has_nodes:
        checks += yield from _cluster(store, answers)
        if any(isinstance(reply, ServerUnavailable) for reply in answers.values()):
            return checks  # the others may need this node
    refusal = first_refusal((yield from store.commands_once(write_trials(store))))
    checks = with_refusal(checks, refusal)
    # Skip the writing checks on an unusable server: writes would wait until they time out.
    fails = (check.verdict is CheckResult.FAIL for check in checks if check.name in _WRITABLE)
    writes = refusal is None and not any(fails)
    # redis-py's cluster client changes the reply of COMMAND INFO; the probes cover clusters.
    listed = not store.has_nodes
    for check in (
        _clock,
        *([_commands] if listed else []),
        _ranges,
        *([_permissions, _layout] if writes else []),
        _keys,
        _scripts,
        _managers,
        _topics,
    ):
        checks.append((yield from check(store)))
    return checks + (yield from _relays(store)) + (yield from _loaders(store))


def _worst(checks: Mapping[str, Sequence[Check]]) -> list[Check]:
    """The checks of all nodes: what one found, or each problem, with the nodes that have it."""
    whole: list[Check] = []
    for name in dict.fromkeys(check.name for own in checks.values() for check in own):
        named = [
            (check, node) for node, own in checks.items() for check in own if check.name == name
        ]
        bad = [(problem, node) for problem, node in named if problem.verdict is not CheckResult.OK]
        for found, nodes in grouped((problem.found, node) for problem, node in bad).items():
            check = next(problem for problem, _ in bad if problem.found == found)
            is_some = len(nodes) < len(checks)
            whole.append(replace(check, found=f"{', '.join(nodes)}: {found}") if is_some else check)
        if not bad:
            whole.append(named[0][0])
    return whole


def _try(store: Store, command: Command) -> Flow[Any]:
    """A command's reply, or the error that the server returned."""
    try:
        return (yield from store.command(*command))
    except ServerUnavailable as error:
        yield from store.command("PING")  # raises if the server is down, not if out of memory
        return error
    except LisaError as error:
        return error


def _cluster(store: Store, answers: Mapping[str, Any]) -> Flow[list[Check]]:
    """Whether each primary answers, and takes the cluster for whole."""
    states = yield from store.on_each_node("CLUSTER", "INFO")
    found: dict[str, list[Check]] = {}
    for node, reply in states.items():
        if isinstance(answers.get(node), ServerUnavailable):
            check = Check.fail("cluster", "does not answer", "start the node, or give it a replica")
        elif isinstance(reply, LisaError):
            check = Check.warn("cluster", "CLUSTER INFO is not permitted", "allow +cluster|info")
        else:
            check = _state(info(reply))
        found[node] = [check]
    return _worst(found)


def _state(fields: Mapping[str, str]) -> Check:
    state = fields.get("cluster_state", "?")
    found = f"state {state}, {fields.get('cluster_size', '?')} primaries"
    if state == "ok":
        return Check.ok("cluster", found)
    return Check.fail("cluster", found, "assign all slots: see CLUSTER SLOTS")


def _clock(store: Store) -> Flow[Check]:
    before = time.time_ns()
    server_us = yield from store.server_time_us()
    middle_us = (before + time.time_ns()) // 2_000
    return check_clock((server_us - middle_us) / 1_000)


def _commands(store: Store) -> Flow[Check]:
    names = every_command()
    reply = yield from _try(store, ("COMMAND", "INFO", *names))
    if isinstance(reply, LisaError):
        return Check.warn("commands", "COMMAND INFO is not permitted", "allow +command")
    missing = [name for name, one in zip(names, reply, strict=True) if not one]
    if missing:
        return Check.fail(
            "commands",
            f"missing: {', '.join(missing)}",
            f"use {SUPPORTED}; check for rename-command",
        )
    return Check.ok("commands", f"all {len(names)} are available")


def _ranges(store: Store) -> Flow[Check]:
    """Try an exclusive stream range; COMMAND INFO does not show this feature."""
    key = store.keys.topic(PROBE).group("lisa").ready
    reply = yield from _try(store, ("XRANGE", key, "(0-1", "+", "COUNT", 1))
    if isinstance(reply, LisaError) and "nvalid stream ID" in str(reply):
        return Check.fail("stream ranges", "no exclusive ranges", f"use {SUPPORTED}")
    return Check.ok("stream ranges", "exclusive ranges work")


def _permissions(store: Store) -> Flow[Check]:
    """Check the rights of the command line. `lisa acl` lists those of the other roles."""
    rights = rights_of([ROLE])
    lacking = yield from refused(store, rights)
    if lacking:
        return Check.fail(
            "rights",
            f"refused: {', '.join(lacking)}",
            f"grant the rights of `lisa acl {ROLE}`: {rules(store, lacking)}",
        )
    return Check.ok("rights", f"all {len(rights)} of the {ROLE}")


def _keys(store: Store) -> Flow[Check]:
    """Run a script that reads a topic's keys, which needs rights on scripts and on the keys."""
    try:
        yield from store.run(Inspect(PROBE, ["none"]))
    except ServerUnavailable:
        raise
    except LisaError as error:
        return Check.fail("scripts", str(error), f"grant the rights of `lisa acl {ROLE}`")
    return Check.ok("scripts", "scripts run on a topic's keys")


def _layout(store: Store) -> Flow[Check]:
    try:
        yield from store.check_schema()
    except ServerUnavailable as error:
        return Check.fail("layout", str(error), "see the checks above")
    except ConfigError as error:
        return Check.fail("layout", str(error), "upgrade, or use another prefix")
    return Check.ok("layout", f"version {SCHEMA_VERSION}, prefix {store.keys.prefix}")


def _scripts(store: Store) -> Flow[Check]:
    shas = [loader.load(name).sha for name in loader.names()]
    reply = yield from _try(store, ("SCRIPT", "EXISTS", *shas))
    if isinstance(reply, LisaError):
        return Check.warn("script cache", "SCRIPT EXISTS is not permitted", "allow +script|exists")
    return Check.ok(
        "script cache", f"{sum(map(bool, reply))} of {len(shas)} loaded; others load on first use"
    )


def _topics(store: Store) -> Flow[Check]:
    """Check for topics that may be mistyped."""
    try:
        names = yield from store.topics()
        states = yield from counts(store, names[: MOST_TOPICS + 1])
        found = yield from suspected_names(store, states)
    except ConfigError as error:
        return Check.warn("topics", str(error), "grant read access to this user")
    if found:
        return Check.warn(
            "topics", "; ".join(found), "correct the name, or start a consumer; see `lisa topics`"
        )
    return Check.ok("topics", f"{len(names):,}")


def _managers(store: Store) -> Flow[Check]:
    try:
        found = yield from roles.managers(store)
        alive = [manager for manager in found if manager.alive]
        if not alive and (yield from write_refusal(store, store.keys.managers)):
            return Check.warn("managers", NO_HEARTBEATS, "see the first check")
    except ConfigError as error:
        return Check.warn("managers", str(error), "grant read access to this user")
    if not alive:
        return Check.warn(
            "managers", "no manager is running: no message is promoted", "start one: lisa-manager"
        )
    return Check.ok("managers", f"{len(alive)} alive")


def _relays(store: Store) -> Flow[list[Check]]:
    """Check for outboxes that are not forwarded; nothing where there are no relays."""
    try:
        found = yield from roles.relays(store)
    except ConfigError as error:
        return [Check.warn("relays", str(error), "grant the rights of this version's `lisa acl`")]
    troubles = roles.outbox_troubles(found)
    if troubles:
        said = "; ".join(f"{one.table}: {one.title}: {one.detail}" for one in troubles)
        return [Check.warn("relays", said, "see `lisa relays`, and the relay's log")]
    alive = sum(relay.alive for relay in found)
    return [Check.ok("relays", f"{alive} alive")] if found else []


def _loaders(store: Store) -> Flow[list[Check]]:
    """Check for loaders without a success for half their horizon; nothing without loaders."""
    try:
        found = yield from loaders(store)
    except ConfigError as error:
        return [Check.warn("loaders", str(error), "grant the rights of this version's `lisa acl`")]
    now_ms = yield from store.server_time_ms()
    late = [
        f"{one.name}: no success for {human(now_ms - one.seen_ms)}"
        for one in found
        if one.is_late(now_ms)
    ]
    if late:
        cure = "see why the job fails; one that will not run again: lisa loaders --forget NAME"
        return [Check.warn("loaders", "; ".join(late), cure)]
    return [Check.ok("loaders", f"{len(found)} in time")] if found else []
