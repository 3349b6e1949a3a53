"""`lisa topics` and `lisa topic`."""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lisa import admin
from lisa.cli.options import Chosen, common, duration, read_text_file
from lisa.cli.output import (
    confirm,
    counting,
    distance,
    fail,
    iso,
    local,
    number,
    print_json,
    print_table,
    terminal_width,
    when,
)
from lisa.core.model.clock import duration_ms, human
from lisa.core.model.keys import check_topic
from lisa.core.model.lanes import Rate
from lisa.core.model.late import LatePolicy, Ramp
from lisa.core.model.options import OF_GROUP, OPTIONS, encode, field_of
from lisa.core.model.options import warning as options_warning
from lisa.core.model.retry_policy import RetryPolicy

if TYPE_CHECKING:
    from lisa.core.store.store import SyncStore

STATES = ("ready", "in_flight", "parked", "retry", "garbage")
"""The states in which a group has messages."""


def counts_fields(counts: admin.topics.TopicState) -> dict[str, Any]:
    """A topic's counts for JSON output."""
    return {
        "topic": counts.topic,
        "paused": counts.paused,
        "waiting": counts.waiting,
        **{state: getattr(counts, state) for state in STATES},
        "next_due": iso(counts.next_due_ms),
        "next_due_ms": counts.next_due_ms,
        "groups": [
            {
                "group": group.name,
                **{state: getattr(group, state) for state in STATES},
                "intact": group.intact,
            }
            for group in counts.groups
        ],
        **{
            name: counts.total(name)
            for name in ("sent", "acked", "retried", "cancelled", "expired", "skipped")
        },
    }


def overdue_warning(
    store: SyncStore, states: Sequence[admin.topics.TopicState], now_ms: int
) -> str | None:
    """Why messages wait: the server refuses writes, or no manager runs; None if all is well."""
    late_ms = admin.topics.overdue_ms(states, now_ms)
    return store.drive(admin.roles.late_warning(store, late_ms))


def print_groups(counts: admin.topics.TopicState) -> None:
    """Print the messages of each group by state."""
    print_table(
        ["group", "ready ", "in flight ", "parked ", "retry ", "garbage "],
        [
            (group.name, group.ready, group.in_flight, group.parked, group.retry, group.garbage)
            for group in counts.groups
        ],
    )


def store_with_topic(chosen: Chosen, topic: str) -> SyncStore:
    """The store; ends the command with exit code 1 if the topic is unknown."""
    store = chosen.store()
    require_topics(store, [topic])
    return store


def require_topics(store: SyncStore, topics: Sequence[str], cure: str = "") -> None:
    """End the command with exit code 1 if one of the topics is unknown; names a similar one."""
    for topic in topics:
        if not store.drive(admin.topics.exists(store, topic)):
            near = difflib.get_close_matches(topic, store.drive(store.topics()), n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            fail(f"topic {topic} is unknown{hint}{cure}")


@contextmanager
def telling_new_topic(store: SyncStore, topic: str) -> Iterator[None]:
    """Say on stderr that the command created the topic: its name may be mistyped."""
    was_known = store.drive(admin.topics.exists(store, topic))
    yield
    if not was_known:
        click.echo(f"lisa: topic {topic} is new", err=True)


def print_suspected_names(store: SyncStore, states: Sequence[admin.topics.TopicState]) -> None:
    """Print to stderr which topics may be mistyped."""
    for line in store.drive(admin.roles.suspected_names(store, states)):
        width = terminal_width() or sys.maxsize
        click.echo(textwrap.fill(f"lisa: {line}", width, break_long_words=False), err=True)


def print_result(chosen: Chosen, topic: str, said: str, *, changed: bool) -> None:
    """Print what a change did, or that it changed nothing."""
    line = f"{topic}  {said}" + ("" if changed else " (unchanged)")
    chosen.answer({"topic": topic, "result": said, "changed": changed}, line)


@click.command()
@common
def topics(chosen: Chosen) -> None:
    """Show the message counts of all topics by state, and the next due time."""
    store = chosen.store()
    found = store.drive(admin.topics.counts(store, store.drive(store.topics())))
    now_ms = store.drive(store.server_time_ms())
    if chosen.json:
        print_json([counts_fields(state) for state in found])
        return
    print_table(
        [
            "topic",
            "waiting ",
            *(f"{state.replace('_', ' ')} " for state in STATES),
            "next due",
            "at",
            "groups",
        ],
        [
            (
                whole.topic + (" (paused)" if whole.paused else ""),
                whole.waiting,
                *(getattr(whole, state) for state in STATES),
                distance(whole.next_due_ms, now_ms),
                local(whole.next_due_ms),
                ", ".join(group.name for group in whole.groups),
            )
            for whole in found
        ],
        drop=["at", "groups", "retry", "next due", "in flight"],
    )
    if said := overdue_warning(store, found, now_ms):
        click.echo(f"lisa: {said}", err=True)
    print_suspected_names(store, found)


@click.group()
def topic() -> None:
    """Show or change one topic: options, pause, groups, pushes."""


@topic.command()
@click.argument("topic")
@common
def show(chosen: Chosen, topic: str) -> None:
    """Show a topic's options, groups and counters. Exit code 1 if the topic is unknown."""
    store = store_with_topic(chosen, topic)
    found = store.drive(admin.topics.counts(store, [topic]))[0]
    options, of_groups = store.drive(store.options(topic)), store.drive(store.group_options(topic))
    now_ms = store.drive(store.server_time_ms())
    ramp = options.ramp and store.drive(admin.topics.ramp_state(store, topic, options.ramp, now_ms))
    p50, p99 = (admin.live.lateness_percentile(found.stats, fraction) for fraction in (0.5, 0.99))
    if chosen.json:
        print_json(
            {
                **counts_fields(found),
                "options": option_fields({name: getattr(options, name) for name in OPTIONS}),
                "group_options": {group: option_fields(own) for group, own in of_groups.items()},
                "ramp_backlog": ramp.backlog if ramp else None,
                "ramp_ms": duration_ms(ramp.lasts) if ramp else None,
                "lateness_p50_ms": p50,
                "lateness_p99_ms": p99,
                "stats": dict(found.stats),
            }
        )
        return
    print_table(
        ["option", "value"],
        [
            *((name, one.kind.show(getattr(options, name))) for name, one in OPTIONS.items()),
            *(
                (f"{name}{OF_GROUP}{group}", OPTIONS[name].kind.show(value))
                for group, own in sorted(of_groups.items())
                for name, value in own.items()
            ),
        ],
    )
    print_groups(found)
    rows: list[tuple[str, object]] = [
        ("waiting", found.waiting),
        ("next due", when(found.next_due_ms, now_ms) or "-"),
    ]
    if ramp:
        rows.append(("backlog on the ramp", ramp.backlog))
        rows.append(("ramp ends in", human(duration_ms(ramp.lasts)) if ramp.backlog else "-"))
    counters = "sent acked retried garbage cancelled expired skipped reclaimed"
    rows += [(name, found.total(name)) for name in counters.split()]
    rows.append(
        ("lateness p50 / p99", f"{number(p50)} / {number(p99)} ms" if p50 is not None else "-")
    )
    print_table(["", ""], rows)


def option_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for JSON output: durations in milliseconds, with names that end in _ms."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, timedelta):
            found[f"{name}_ms"] = duration_ms(value)
        elif isinstance(value, RetryPolicy):
            found["retry_delays_ms"], found["retry_jitter"] = list(value.delays_ms), value.jitter
        else:
            found[name] = str(value) if isinstance(value, (LatePolicy, Ramp, Rate)) else value
    return found


@topic.command()
@click.argument("topic")
@common
def pause(chosen: Chosen, topic: str) -> None:
    """Pause promotion and delivery. Messages in flight can still finish."""
    store = store_with_topic(chosen, topic)
    print_result(chosen, topic, "paused", changed=store.drive(admin.topics.pause(store, topic)))


@topic.command()
@click.argument("topic")
@common
def resume(chosen: Chosen, topic: str) -> None:
    """Resume a paused topic."""
    store = store_with_topic(chosen, topic)
    print_result(chosen, topic, "running", changed=store.drive(admin.topics.resume(store, topic)))


@topic.command()
@click.argument("topic")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common
def delete(chosen: Chosen, topic: str, *, yes: bool) -> None:
    """Delete a topic with its messages, groups, options and counters.

    Stop its consumers and producers first. A topic in a manager's YAML comes back without messages.
    """
    store = store_with_topic(chosen, topic)
    (found,) = store.drive(admin.topics.counts(store, [topic]))
    held = found.waiting + sum(getattr(found, state) for state in STATES)
    names = ", ".join(group.name for group in found.groups) or "none"
    confirm(f"Topic {topic} has {held} messages (groups: {names}). Delete it?", yes=yes)
    with counting("purged") as progress:
        done = store.drive(admin.groups.delete(store, topic, progress=progress))
    print_result(
        chosen,
        topic,
        f"deleted; {done.cancelled} waiting messages cancelled, {done.purged} others purged",
        changed=True,
    )


class _WithOptions(click.Command):
    """A command whose help lists the topic options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, their valid values and defaults."""
        rows = []
        for name, one in OPTIONS.items():
            limits = f"Valid: {one.kind.bounds}. Default: {one.kind.show(one.default)}."
            rows.append((name, f"{one.text} {limits}"))
        with formatter.section("Topic options"):
            formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)


@topic.command("set", cls=_WithOptions)
@click.argument("topic")
@click.argument("pairs", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option("--group", help="Set options of lanes for this group only.")
@click.option("--create", is_flag=True, help="Create the topic if it is unknown.")
@common
def set_(
    chosen: Chosen, topic: str, pairs: tuple[str, ...], *, group: str | None, create: bool
) -> None:
    """Set options, as in ack_timeout=30s retry_delays=0,2m,10m capacity=unlimited.

    Options set here override the YAML configuration of managers. Exit code 1 if the topic is
    unknown, unless --create is given.
    """
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"{pair!r} is not KEY=VALUE")
        options[field_of(name, group)] = value
    encoded, store = encode(options), chosen.store()
    if not create:
        require_topics(store, [check_topic(topic)], "; to create it, add --create")
    changed = store.drive(admin.topics.set_options(store, topic, options, group))
    if (said := options_warning(topic, encoded)) is not None:
        click.echo(f"lisa: warning: {said}", err=True)
    print_result(chosen, topic, f"{changed} changed", changed=changed > 0)


@topic.command()
@click.argument("topic")
@click.argument("names", metavar="KEY...", nargs=-1, required=True)
@click.option("--group", help="Reset the group's own values; those of the topic apply.")
@common
def unset(chosen: Chosen, topic: str, names: tuple[str, ...], *, group: str | None) -> None:
    """Reset options to their defaults, or to the YAML values of a manager at its next start."""
    store = store_with_topic(chosen, topic)
    changed = store.drive(admin.topics.unset_options(store, topic, names, group))
    print_result(chosen, topic, f"{changed} changed", changed=changed > 0)


@click.group()
def group() -> None:
    """Add, remove or list a topic's groups."""


@group.command("add")
@click.argument("topic")
@click.argument("group")
@common
def group_add(chosen: Chosen, topic: str, group: str) -> None:
    """Declare a group. It receives every message that is promoted from now on."""
    store = chosen.store()
    with telling_new_topic(store, topic):
        new = store.drive(admin.groups.add(store, topic, group))
        print_result(chosen, topic, f"group {group} is declared", changed=new)


@group.command("remove")
@click.argument("topic")
@click.argument("group")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common
def group_remove(chosen: Chosen, topic: str, group: str, *, yes: bool) -> None:
    """Remove a group and purge its messages; other groups keep theirs.

    The group's consumers stop reading the topic. Repeat the command to finish an interrupted
    removal.
    """
    store = store_with_topic(chosen, topic)
    owed = store.drive(admin.groups.unsettled_in_all(store, topic, group))
    if owed:
        confirm(
            f"Group {group} of {topic} still has {owed} unsettled messages. Remove it?", yes=yes
        )
    with counting("purged") as progress:
        settled = store.drive(admin.groups.remove(store, topic, group, progress=progress))
    if settled is None:
        fail(f"topic {topic} has no group {group}")
    print_result(
        chosen, topic, f"group {group} is removed, {settled} messages purged", changed=True
    )


@group.command("list")
@click.argument("topic")
@common
def list_groups(chosen: Chosen, topic: str) -> None:
    """List the topic's groups."""
    store = store_with_topic(chosen, topic)
    found = store.drive(admin.topics.counts(store, [topic]))[0]
    if chosen.json:
        print_json(counts_fields(found)["groups"])
        return
    print_groups(found)


@click.group()
def journal() -> None:
    """Show a topic's journal, or forget an archive."""


@journal.command("show")
@click.argument("topic")
@common
def show_journal(chosen: Chosen, topic: str) -> None:
    """Show the journal's length and the progress of each archive."""
    store = store_with_topic(chosen, topic)
    found = store.drive(admin.journal.journal(store, topic))
    if chosen.json:
        print_json(found)
        return
    now_ms = store.drive(store.server_time_ms())
    print_table(
        ["", ""],
        [
            ("journal", "on" if found.on else "off"),
            ("events", found.events),
            ("oldest event", when(found.since_ms, now_ms) or "-"),
            ("written in total", found.written),
            ("lost before archiving", found.lost),
            ("failed writes", found.failed),
        ],
    )
    print_table(
        ["archive", "behind ", "last report"],
        [
            (archive.name, archive.behind, when(archive.reported_ms, now_ms))
            for archive in found.archives
        ],
    )


@journal.command("forget")
@click.argument("topic")
@click.argument("archive")
@common
def forget_archive(chosen: Chosen, topic: str, archive: str) -> None:
    """Stop keeping events for an archive that is no longer used."""
    store = store_with_topic(chosen, topic)
    if not store.drive(admin.journal.forget(store, topic, archive)):
        fail(f"topic {topic} has no archive {archive}")
    print_result(chosen, topic, f"archive {archive} is forgotten", changed=True)


@click.command()
@click.argument("topic")
@click.argument("url", required=False)
@click.option("--group", help="Group to push. Default: the topic's only group.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Maximum concurrent pushes of each gateway process.",
)
@click.option("--timeout", type=duration, help="Maximum time for the target to answer.")
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the signing secret (whsec_...). Default: a generated secret.",
)
@click.option("--new-secret", is_flag=True, help="Generate a new signing secret.")
@click.option("--remove", is_flag=True, help="Stop pushing.")
@common
def push(
    chosen: Chosen,
    topic: str,
    url: str | None,
    *,
    group: str | None,
    concurrency: int | None,
    timeout: timedelta | None,
    secret_file: Path | None,
    new_secret: bool,
    remove: bool,
) -> None:
    """Make the gateways POST each message of a group to URL. Without URL, list the push targets.

    The signing secret is printed once, when it is generated. Exit code 1 if there is no target.
    """
    settings = (concurrency, timeout, secret_file, new_secret or None)
    if url is None and any(setting is not None for setting in settings):
        raise click.UsageError("these options need a URL")
    if remove and url is not None:
        raise click.UsageError("--remove takes no URL")
    if new_secret and secret_file is not None:
        raise click.UsageError("--new-secret and --secret-file exclude each other")
    if remove:
        _remove_targets(chosen, topic, group)
        return
    if url is None:
        _show_targets(chosen, topic, group)
        return

    secret = None if secret_file is None else read_text_file(secret_file).strip()
    store = chosen.store()
    with telling_new_topic(store, topic):
        done = store.drive(
            admin.push.set_target(
                store,
                topic,
                url,
                group=group,
                concurrency=concurrency,
                timeout=timeout,
                secret=secret,
                renew_secret=new_secret,
            )
        )
        _print_target(chosen, done)


def _print_target(chosen: Chosen, done: admin.push.SetTarget) -> None:
    target = done.target
    if chosen.json:
        secret = {"secret": target.secret} if done.is_new_secret else {}
        print_json({**_target_fields(target), "new": done.is_new, **secret})
        return
    click.echo(f"{target.topic}  group {target.group} is pushed to {target.url}")
    if done.is_new_secret:
        click.echo(f"secret (shown only once): {target.secret}")


def _target_fields(target: admin.push.StoredPushTarget) -> dict[str, Any]:
    return {
        "topic": target.topic,
        "group": target.group,
        "url": target.url,
        "concurrency": target.concurrency,
        "timeout_ms": target.timeout_ms,
    }


def _show_targets(chosen: Chosen, topic: str, group: str | None) -> None:

    store = chosen.store()
    found = [
        target
        for target in store.drive(admin.push.targets(store, topic))
        if group in (None, target.group)
    ]
    if chosen.json:
        print_json([_target_fields(target) for target in found])
    elif found:
        print_table(
            ["group", "url", "concurrency ", "timeout "],
            [
                (
                    target.group,
                    target.url,
                    target.concurrency or "-",
                    human(target.timeout_ms) if target.timeout_ms else "-",
                )
                for target in found
            ],
        )
    if not found:
        _fail_without_target(topic, group)


def _remove_targets(chosen: Chosen, topic: str, group: str | None) -> None:

    store = chosen.store()
    gone = store.drive(admin.push.remove(store, topic, group))
    if not gone:
        _fail_without_target(topic, group)
    line = f"{topic}  no longer pushed: {', '.join(gone)}"
    chosen.answer({"topic": topic, "removed": gone}, line)


def _fail_without_target(topic: str, group: str | None) -> NoReturn:
    of = f"group {group} of topic {topic}" if group else f"topic {topic}"
    fail(f"{of} has no push target")


for _part in (push, group, journal):
    topic.add_command(_part)
