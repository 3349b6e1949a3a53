"""`lisa consumers`, `managers`, `relays`, `loaders`, `acl`, `doctor` and `fsck`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import msgspec

from lisa import admin
from lisa.cli.options import Chosen, common, read_text_file
from lisa.cli.output import console, fail, print_json, print_table
from lisa.cli.topics import require_topics
from lisa.core.model.clock import human
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import Keys, shown_id
from lisa.core.model.sharding import topic_of

_USER = re.compile(r"[^\s\x00]{1,128}\Z")
FINDINGS_SHOWN = 100


@click.command()
@click.argument("topic", required=False)
@common
def consumers(chosen: Chosen, topic: str | None) -> None:
    """List the consumers of TOPIC or of all topics, including consumers that are gone.

    Exit code 1 if the topic is unknown.
    """
    store = chosen.store()
    found = store.drive(admin.roles.consumers(store, [topic] if topic else ()))
    if topic and not found:
        require_topics(store, [topic])
    if _as_json(chosen, found):
        return
    rows = []
    for seen in found:
        one = seen.record
        rows.append(
            (
                one.topic,
                one.group or "(no group yet)",
                one.name,
                one.condition if seen.alive else seen.state,
                f"{one.running}/{one.concurrency}",
                one.held,
                one.handled,
                f"{human(seen.silent_ms)} ago",
            )
        )
    columns = ["topic", "group", "consumer", "state", "running ", "held ", "handled ", "seen"]
    print_table(columns, rows, drop=["held", "handled", "seen", "running"])


@click.command()
@common
def managers(chosen: Chosen) -> None:
    """List the managers, including managers that are gone."""
    store = chosen.store()
    found = store.drive(admin.roles.managers(store))
    if _as_json(chosen, found):
        return
    print_table(
        ["manager", "state", "host", "pid ", "topics ", "seen"],
        [
            (
                seen.record.name,
                seen.state,
                seen.record.host,
                seen.record.pid,
                seen.record.topics,
                f"{human(seen.silent_ms)} ago",
            )
            for seen in found
        ],
        drop=["pid", "host", "topics"],
    )


@click.command()
@common
def relays(chosen: Chosen) -> None:
    """List the relays of outboxes, including relays that are gone."""
    store = chosen.store()
    found = store.drive(admin.roles.relays(store))
    if _as_json(chosen, found):
        return
    print_table(
        ["relay", "state", "table", "waiting ", "oldest ", "set aside ", "seen", "error"],
        [
            (
                seen.record.name,
                seen.state,
                seen.record.table,
                seen.record.backlog,
                human(seen.record.age_ms),
                seen.record.set_aside,
                f"{human(seen.silent_ms)} ago",
                seen.record.error,
            )
            for seen in found
        ],
        drop=["relay", "seen", "oldest"],
    )


@click.command()
@click.option("--forget", metavar="NAME", help="Forget a loader that is not to run again.")
@common
def loaders(chosen: Chosen, forget: str | None) -> None:
    """List the jobs with --due-within and their last successful runs.

    Exit code 1 if there is no loader to forget.
    """
    from lisa.core.store import presence

    store = chosen.store()
    if forget is not None and not store.ask("HDEL", store.keys.loaders, forget):
        fail(f"there is no loader {forget!r}")
    rows = []
    for one in store.drive(presence.loaders(store)):
        state = "late" if one.is_late(now_ms := chosen.server_ms()) else "ok"
        success = f"{human(now_ms - one.seen_ms)} ago" if one.has_succeeded else "none"
        rows.append((one.name, state, one.topic, success, human(one.horizon_ms)))
    columns = ["loader", "state", "topic", "last success", "horizon"]
    if chosen.json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)


def _as_json(chosen: Chosen, found: list[admin.roles.RolePresence[Any]]) -> bool:
    if not chosen.json:
        return False

    print_json(
        [
            {
                **msgspec.structs.asdict(seen.record),
                "silent_ms": seen.silent_ms,
                "alive": seen.alive,
                "unknown": seen.is_unknown,
            }
            for seen in found
        ]
    )
    return True


@click.command()
@click.argument("roles", nargs=-1, metavar="[ROLE]...")
@click.option("--user", help="Name of a single user that gets the rights of all given roles.")
@click.option(
    "--password-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the user's password; the output contains its SHA-256.",
)
@click.option("--nopass", is_flag=True, help="The user needs no password.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["setuser", "file"]),
    default="setuser",
    help="Print commands for redis-cli (default) or lines of an ACL file.",
)
@click.option("--cluster", is_flag=True, help="Include the commands that a cluster client needs.")
@click.option(
    "--durability",
    is_flag=True,
    help="Include the commands that a producer, gateway, operator or relay needs to wait for "
    "replicas.",
)
@common
def acl(
    chosen: Chosen,
    roles: tuple[str, ...],
    user: str | None,
    password_file: Path | None,
    style: str,
    *,
    nopass: bool,
    cluster: bool,
    durability: bool,
) -> None:
    """Print the minimal ACL rights that each ROLE needs on the server.

    Roles: producer, manager, consumer, gateway, operator (this command line), relay, pipeline and
    reader (read-only). Default: all roles. Users are named PREFIX-ROLE. Without a password option,
    the output sets rights only: an existing user keeps its passwords, a new user is disabled.

    With --redis, the output includes the newer commands that the server supports. Otherwise it
    works on every server since Redis 6.2.
    """
    if nopass and password_file is not None:
        raise click.UsageError("--nopass and --password-file exclude each other")
    names = admin.acl.check_roles(roles)
    keys = Keys(chosen.server()[1])
    users = {user: names} if user else {f"{keys.prefix}-{role}": [role] for role in names}
    for name in users:
        if not _USER.match(name):
            raise click.UsageError(f"{name!r} is not a valid user name: it must not contain spaces")
    password = "" if nopass else _password(password_file)
    if password and len(users) > 1:
        raise click.UsageError("a password needs a single user: give one ROLE, or --user")
    newer = _newer(chosen)
    found = []
    for name, some in users.items():
        commands = admin.acl.rights_of(some, newer=newer, cluster=cluster, durability=durability)
        text = admin.acl.line(name, some, commands, keys, password=password, style=style)
        found.append({"user": name, "roles": some, "commands": commands, "line": text})
    if chosen.json:
        print_json({"prefix": keys.prefix, "users": found})
        return
    for entry in found:
        click.echo(entry["line"])


def _password(path: Path | None) -> str | None:
    if path is None:
        return None

    found = read_text_file(path).rstrip("\r\n")
    if not found:
        raise ConfigError(f"{path} is empty: write the password to it, or use --nopass")
    return found


def _newer(chosen: Chosen) -> frozenset[str]:
    if chosen.redis is None:
        return frozenset()

    store = chosen.store(checked=False)
    return frozenset(
        command for command in admin.acl.NEWER if store.ask("COMMAND", "INFO", command)[0]
    )


@click.command()
@common
def doctor(chosen: Chosen) -> None:
    """Check whether the server is configured for a queue, and suggest fixes.

    Exit code 1 if a check fails; warnings do not count.
    """
    store = chosen.store(checked=False)
    checks = store.drive(admin.doctor.examine(store))
    ok = all(check.verdict != "fail" for check in checks)
    if chosen.json:
        print_json(
            {
                "ok": ok,
                "server": store.where,
                "checks": [
                    {
                        "check": check.name,
                        "verdict": str(check.verdict),
                        "found": check.found,
                        "cure": check.cure or None,
                    }
                    for check in checks
                ],
            }
        )
    else:
        print_table(
            ["", "check", "found", "what to change"],
            [(str(check.verdict), check.name, check.found, check.cure) for check in checks],
            title=store.where,
        )
    if not ok:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option("--repair", is_flag=True, help="Repair the findings. No repair loses a message.")
@common
def fsck(chosen: Chosen, topics: tuple[str, ...], *, repair: bool) -> None:
    """Check that every live message is in exactly one state per group, and list inconsistencies.

    The check runs on a live system; no step blocks the server for more than a few milliseconds.
    --repair makes a message without a state due now and declares lost groups again. Findings that
    cannot be repaired are listed with a reason. Exit code 1 if an inconsistency remains, or if a
    topic is unknown.
    """
    store = chosen.store()
    with console(err=True).status("") as status:

        def progress(phase: str, report: admin.fsck.CheckReport) -> None:
            status.update(f"{phase} ... {report.bodies:,} messages, {report.total:,} findings")

        report = store.drive(admin.fsck.check(store, topics, repair=repair, progress=progress))
    if not (report.total or report.bodies):
        require_topics(store, topics)
    if chosen.json:
        print_json(
            {
                "ok": report.ok,
                "repair": repair,
                "topics": report.topics,
                "messages": report.bodies,
                "records": report.records,
                "entries": report.entries,
                "found": report.total,
                "repaired": report.repaired,
                "kinds": report.kinds,
                "findings": report.findings,
            }
        )
    else:
        _show_report(report, repair=repair)
    damaged = {topic_of(finding.topic) for finding in report.findings}
    require_topics(store, [topic for topic in topics if topic not in damaged])
    if not report.ok:
        raise click.exceptions.Exit(1)


def _show_report(report: admin.fsck.CheckReport, *, repair: bool) -> None:

    if report.findings:
        print_table(
            ["finding", "topic", "group", "id", "", "repaired"],
            [
                (
                    finding.kind,
                    finding.topic,
                    finding.group,
                    shown_id(finding.id or ""),
                    finding.what,
                    "yes" if finding.repaired else "no",
                )
                for finding in report.findings[:FINDINGS_SHOWN]
            ],
        )
        if report.total > FINDINGS_SHOWN:
            click.echo(
                f"... the first {FINDINGS_SHOWN} of {report.total:,}; --json lists up to 10,000"
            )
        print_table(
            ["finding", "times ", "meaning"],
            [(kind, n, admin.fsck.KINDS[kind]) for kind, n in report.kinds.most_common()],
        )
    topics = len(report.topics)
    checked = (
        f"{topics} topic{'' if topics == 1 else 's'}, {report.bodies:,} messages, "
        f"{report.records:,} records, {report.entries:,} stream entries"
    )
    if not report.total:
        click.echo(f"{checked}: no inconsistencies")
        return
    left = report.total - report.repaired
    hint = "" if repair else "; run with --repair to fix them"
    click.echo(
        f"{checked}: {report.total} inconsistent, {report.repaired} repaired"
        + (f", {left} left{hint}" if left else "")
    )
