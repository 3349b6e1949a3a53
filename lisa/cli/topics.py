"""`lisa topics` and `lisa topic`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, common, pass_chosen
from lisa.cli.push import push

if TYPE_CHECKING:
    from lisa.admin.topics import TopicCounts
    from lisa.core.options import TopicOptions
    from lisa.core.store import SyncStore

__all__ = ["counts_fields", "topic", "topics"]


@click.command()
@common
@pass_chosen
def topics(chosen: Chosen) -> None:
    """Show all topics: how many messages stand where, and when the next is due."""
    from lisa.admin.topics import counts
    from lisa.cli.output import print_json, print_table, when

    store = chosen.store()
    found = store.drive(counts(store, store.drive(store.topics())))
    now_ms = store.drive(store.server_time_us()) // 1000
    if chosen.json:
        print_json([counts_fields(one) for one in found])
        return
    print_table(
        ["topic", "waiting ", "ready ", "in flight ", "retry ", "garbage ", "next due", "groups"],
        [
            (
                one.topic + (" (paused)" if one.paused else ""), one.waiting,
                *(sum(getattr(group, state) for group in one.groups)
                  for state in ("ready", "in_flight", "retry", "garbage")),
                when(one.next_due_ms, now_ms), ", ".join(group.name for group in one.groups),
            )
            for one in found
        ],
    )  # fmt: skip


def counts_fields(counts: TopicCounts) -> dict[str, Any]:
    """A topic's counts for programs."""
    from lisa.cli.output import iso

    names = ("ready", "in_flight", "retry", "garbage")
    return {
        "topic": counts.topic, "paused": counts.paused, "waiting": counts.waiting,
        **{name: sum(getattr(group, name) for group in counts.groups) for name in names},
        "next_due": iso(counts.next_due_ms), "next_due_ms": counts.next_due_ms,
        "groups": [
            {"group": group.name, **{name: getattr(group, name) for name in names},
             "intact": group.intact}
            for group in counts.groups
        ],
        "sent": counts.total("sent"), "acked": counts.total("acked"),
        "retried": counts.total("retried"), "cancelled": counts.total("cancelled"),
        "expired": counts.total("expired"),
    }  # fmt: skip


@click.group()
def topic() -> None:
    """Show or change one topic: options, pause, groups, pushes."""


topic.add_command(push)


@topic.command()
@click.argument("topic")
@common
@pass_chosen
def show(chosen: Chosen, topic: str) -> None:
    """Show a topic's options, groups and counters. Exit code 1 if nothing is known of it."""
    from lisa.admin.live import lateness_buckets
    from lisa.admin.topics import counts
    from lisa.cli.output import number, print_json, print_table, when
    from lisa.core.lateness import percentile

    store = _known(chosen, topic)
    found = store.drive(counts(store, [topic]))[0]
    options = store.drive(store.options(topic))
    buckets = lateness_buckets(found.stats)
    p50, p99 = percentile(buckets, 0.5), percentile(buckets, 0.99)
    if chosen.json:
        print_json({
            **counts_fields(found), "options": option_fields(options),
            "lateness_p50_ms": p50, "lateness_p99_ms": p99, "stats": dict(found.stats),
        })  # fmt: skip
        return
    now_ms = store.drive(store.server_time_us()) // 1000
    print_table(["option", "value"], _option_rows(options))
    print_table(
        ["group", "ready ", "in flight ", "retry ", "garbage "],
        [(group.name, group.ready, group.in_flight, group.retry, group.garbage)
         for group in found.groups],
    )  # fmt: skip
    rows: list[tuple[str, object]] = [
        ("waiting", found.waiting), ("next due", when(found.next_due_ms, now_ms) or "-"),
    ]  # fmt: skip
    counters = ("sent", "acked", "retried", "garbage", "cancelled", "expired", "reclaimed")
    rows += [(name, found.total(name)) for name in counters]
    rows.append(("lateness p50 / p99", f"{number(p50)} / {number(p99)} ms" if buckets else "-"))
    print_table(["", ""], rows)


def _known(chosen: Chosen, topic: str) -> SyncStore:
    from lisa.admin.topics import exists

    store = chosen.store()
    if not store.drive(exists(store, topic)):
        click.echo(f"lisa: nothing is known of topic {topic}", err=True)
        raise click.exceptions.Exit(1)
    return store


def option_fields(options: TopicOptions) -> dict[str, Any]:
    """Options for programs: durations in milliseconds, under names that say so."""
    from lisa.core.clock import duration_ms

    found: dict[str, Any] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, timedelta):
            found[f"{option.name}_ms"] = duration_ms(value)
        elif option.name == "retry_delays":
            found["retry_delays_ms"], found["retry_jitter"] = list(value.delays_ms), value.jitter
        else:
            found[option.name] = value
    return found


def _option_rows(options: TopicOptions) -> Iterable[tuple[str, object]]:
    from lisa.core.clock import duration_ms, human

    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, timedelta):
            value = human(duration_ms(value))
        elif option.name == "retry_delays":
            jitter = f", jitter {value.jitter:g}" if value.jitter else ""
            value = (", ".join(map(human, value.delays_ms)) or "none") + jitter
        elif value is None:
            value = "unlimited"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        yield option.name, value


@topic.command()
@click.argument("topic")
@common
@pass_chosen
def pause(chosen: Chosen, topic: str) -> None:
    """Stop promoting, reading and pulling; what is in flight finishes."""
    from lisa.admin.topics import pause as flow

    store = _known(chosen, topic)
    _say(chosen, topic, "paused", changed=store.drive(flow(store, topic)))


@topic.command()
@click.argument("topic")
@common
@pass_chosen
def resume(chosen: Chosen, topic: str) -> None:
    """Go on with a paused topic."""
    from lisa.admin.topics import resume as flow

    store = _known(chosen, topic)
    _say(chosen, topic, "running", changed=store.drive(flow(store, topic)))


@topic.command("set")
@click.argument("topic")
@click.argument("pairs", metavar="KEY=VALUE...", nargs=-1, required=True)
@common
@pass_chosen
def set_(chosen: Chosen, topic: str, pairs: tuple[str, ...]) -> None:
    """Set options, as in ack_timeout=30s retry_delays=0,2m,10m capacity=unlimited.

    What is set here lasts, whatever a manager's YAML declares.
    """
    from lisa.admin.topics import set_options

    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"{pair!r} is not KEY=VALUE")
        options[name] = value
    store = chosen.store()
    changed = store.drive(set_options(store, topic, options))
    _say(chosen, topic, f"{changed} changed", changed=changed > 0)


@topic.command()
@click.argument("topic")
@click.argument("names", metavar="KEY...", nargs=-1, required=True)
@common
@pass_chosen
def unset(chosen: Chosen, topic: str, names: tuple[str, ...]) -> None:
    """Take options back to their defaults, or to what a manager's YAML declares at its start."""
    from lisa.admin.topics import unset_options

    store = _known(chosen, topic)
    changed = store.drive(unset_options(store, topic, names))
    _say(chosen, topic, f"{changed} changed", changed=changed > 0)


def _say(chosen: Chosen, topic: str, said: str, *, changed: bool) -> None:
    from lisa.cli.output import print_json

    if chosen.json:
        print_json({"topic": topic, "result": said, "changed": changed})
    else:
        click.echo(f"{topic}  {said}" + ("" if changed else " (as it was)"))


@topic.group()
def group() -> None:
    """Add, remove or list a topic's groups."""


@group.command()
@click.argument("topic")
@click.argument("group")
@common
@pass_chosen
def add(chosen: Chosen, topic: str, group: str) -> None:
    """Declare a group: it gets every message that is promoted from now on."""
    from lisa.admin.groups import add as flow

    store = chosen.store()
    new = store.drive(flow(store, topic, group))
    _say(chosen, topic, f"group {group} is declared", changed=new)


@group.command()
@click.argument("topic")
@click.argument("group")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
@pass_chosen
def remove(chosen: Chosen, topic: str, group: str, *, yes: bool) -> None:
    """Take a group away. What only it owed is purged; other groups keep theirs.

    Its consumers stop taking the topic. A removal that was cut short is finished by a second call.
    """
    from lisa.admin import groups
    from lisa.cli.output import confirm

    store = _known(chosen, topic)
    owed = store.drive(groups.owed_in_all(store, topic, group))
    if owed:
        confirm(f"Group {group} of {topic} still owes {owed} messages. Remove it?", yes=yes)
    settled = _with_count(
        "purged", lambda step: store.drive(groups.remove(store, topic, group, progress=step))
    )
    if settled is None:
        click.echo(f"lisa: topic {topic} has no group {group}", err=True)
        raise click.exceptions.Exit(1)
    _say(chosen, topic, f"group {group} is removed, {settled} messages purged", changed=True)


def _with_count(verb: str, work: Callable[[Callable[[int], None]], int | None]) -> int | None:
    """Run long work with a count on the terminal."""
    from lisa.cli.output import console

    with console(err=True).status("") as status:
        return work(lambda n: status.update(f"{n} {verb}"))


@group.command("list")
@click.argument("topic")
@common
@pass_chosen
def list_groups(chosen: Chosen, topic: str) -> None:
    """List the topic's groups."""
    from lisa.admin.topics import counts
    from lisa.cli.output import print_json, print_table

    store = _known(chosen, topic)
    found = store.drive(counts(store, [topic]))[0]
    if chosen.json:
        print_json(counts_fields(found)["groups"])
        return
    print_table(
        ["group", "ready ", "in flight ", "retry ", "garbage "],
        [(one.name, one.ready, one.in_flight, one.retry, one.garbage) for one in found.groups],
    )


@topic.group()
def journal() -> None:
    """Look at a topic's journal, or let an archive go."""


@journal.command("show")
@click.argument("topic")
@common
@pass_chosen
def show_journal(chosen: Chosen, topic: str) -> None:
    """Show how long the journal is, and how far each archive has come."""
    from dataclasses import asdict

    from lisa.admin.journal import journal as flow
    from lisa.cli.output import print_json, print_table, when

    store = _known(chosen, topic)
    found = store.drive(flow(store, topic))
    if chosen.json:
        print_json(asdict(found))
        return
    now_ms = store.drive(store.server_time_us()) // 1000
    print_table(["", ""], [
        ("journal", "on" if found.on else "off"), ("events here", found.events),
        ("since", when(found.since_ms, now_ms) or "-"), ("written in all", found.written),
        ("lost, no archive had them", found.lost), ("could not be written", found.failed),
    ])  # fmt: skip
    print_table(
        ["archive", "behind ", "last report"],
        [(one.name, one.behind, when(one.reported_ms, now_ms)) for one in found.archives],
    )


@journal.command("forget")
@click.argument("topic")
@click.argument("archive")
@common
@pass_chosen
def forget_archive(chosen: Chosen, topic: str, archive: str) -> None:
    """Let the journal wait no longer for an archive that will not come back."""
    from lisa.admin.journal import forget

    store = _known(chosen, topic)
    if not store.drive(forget(store, topic, archive)):
        click.echo(f"lisa: topic {topic} knows no archive {archive}", err=True)
        raise click.exceptions.Exit(1)
    _say(chosen, topic, f"archive {archive} is forgotten", changed=True)
