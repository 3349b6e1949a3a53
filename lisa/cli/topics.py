"""`lisa topics` and `lisa topic`."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, common
from lisa.cli.output import (
    confirm,
    counting,
    distance,
    local,
    number,
    print_json,
    print_table,
    when,
)
from lisa.cli.push import push
from lisa.cli.topic_groups import group
from lisa.cli.topic_journal import journal
from lisa.cli.topic_output import (
    STATES,
    counts_fields,
    overdue_warning,
    print_groups,
    print_result,
    print_suspected_names,
    require_topics,
    store_with_topic,
)
from lisa.core.model.clock import duration_ms
from lisa.core.model.late import LatePolicy, Ramp

if TYPE_CHECKING:
    from lisa.core.model.options import TopicOptions


@click.command()
@common
def topics(chosen: Chosen) -> None:
    """Show the message counts of all topics by state, and the next due time."""
    from lisa.admin.topics import counts

    store = chosen.store()
    found = store.drive(counts(store, store.drive(store.topics())))
    now_ms = store.drive(store.server_time_ms())
    if chosen.json:
        print_json([counts_fields(one) for one in found])
        return
    print_table(
        [
            "topic",
            "waiting ",
            *(f"{one.replace('_', ' ')} " for one in STATES),
            "next due",
            "at",
            "groups",
        ],
        [
            (
                one.topic + (" (paused)" if one.paused else ""),
                one.waiting,
                *(getattr(one, state) for state in STATES),
                distance(one.next_due_ms, now_ms),
                local(one.next_due_ms),
                ", ".join(group.name for group in one.groups),
            )
            for one in found
        ],
        drop=["at", "groups", "retry", "next due", "in flight"],
    )
    if said := overdue_warning(store, found, now_ms):
        click.echo(f"lisa: {said}", err=True)
    print_suspected_names(store, found)


@click.group()
def topic() -> None:
    """Show or change one topic: options, pause, groups, pushes."""


for _part in (push, group, journal):
    topic.add_command(_part)


@topic.command()
@click.argument("topic")
@common
def show(chosen: Chosen, topic: str) -> None:
    """Show a topic's options, groups and counters. Exit code 1 if the topic is unknown."""
    from lisa.admin.live import lateness_percentile
    from lisa.admin.ramp import ramp_state
    from lisa.admin.topics import counts
    from lisa.core.model.clock import human
    from lisa.core.model.options import OPTIONS

    store = store_with_topic(chosen, topic)
    found = store.drive(counts(store, [topic]))[0]
    options = store.drive(store.options(topic))
    now_ms = store.drive(store.server_time_ms())
    ramp = options.ramp and store.drive(ramp_state(store, topic, options.ramp, now_ms))
    p50, p99 = (lateness_percentile(found.stats, fraction) for fraction in (0.5, 0.99))
    if chosen.json:
        print_json(
            {
                **counts_fields(found),
                "options": option_fields(options),
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
        [(name, one.kind.show(getattr(options, name))) for name, one in OPTIONS.items()],
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


def option_fields(options: TopicOptions) -> dict[str, Any]:
    """Options for JSON output: durations in milliseconds, with names that end in _ms."""
    found: dict[str, Any] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, timedelta):
            found[f"{option.name}_ms"] = duration_ms(value)
        elif option.name == "retry_delays":
            found["retry_delays_ms"], found["retry_jitter"] = list(value.delays_ms), value.jitter
        else:
            found[option.name] = str(value) if isinstance(value, (LatePolicy, Ramp)) else value
    return found


@topic.command()
@click.argument("topic")
@common
def pause(chosen: Chosen, topic: str) -> None:
    """Pause promotion and delivery. Messages in flight can still finish."""
    from lisa.admin.topics import pause as flow

    store = store_with_topic(chosen, topic)
    print_result(chosen, topic, "paused", changed=store.drive(flow(store, topic)))


@topic.command()
@click.argument("topic")
@common
def resume(chosen: Chosen, topic: str) -> None:
    """Resume a paused topic."""
    from lisa.admin.topics import resume as flow

    store = store_with_topic(chosen, topic)
    print_result(chosen, topic, "running", changed=store.drive(flow(store, topic)))


@topic.command()
@click.argument("topic")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common
def delete(chosen: Chosen, topic: str, *, yes: bool) -> None:
    """Delete a topic with its messages, groups, options and counters.

    Stop its consumers and producers first. A topic in a manager's YAML comes back without messages.
    """
    from lisa.admin.deletion import delete as flow
    from lisa.admin.topics import counts

    store = store_with_topic(chosen, topic)
    (found,) = store.drive(counts(store, [topic]))
    held = found.waiting + sum(getattr(found, state) for state in STATES)
    names = ", ".join(group.name for group in found.groups) or "none"
    confirm(f"Topic {topic} has {held} messages (groups: {names}). Delete it?", yes=yes)
    with counting("purged") as progress:
        done = store.drive(flow(store, topic, progress=progress))
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
        from lisa.core.model.options import OPTIONS

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
@click.option("--create", is_flag=True, help="Create the topic if it is unknown.")
@common
def set_(chosen: Chosen, topic: str, pairs: tuple[str, ...], *, create: bool) -> None:
    """Set options, as in ack_timeout=30s retry_delays=0,2m,10m capacity=unlimited.

    Options set here override the YAML configuration of managers. Exit code 1 if the topic is
    unknown, unless --create is given.
    """
    from lisa.admin.topics import set_options
    from lisa.core.model.keys import check_topic
    from lisa.core.model.options import encode, warning

    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"{pair!r} is not KEY=VALUE")
        options[name] = value
    encoded, store = encode(options), chosen.store()
    if not create:
        require_topics(store, [check_topic(topic)], "; to create it, add --create")
    changed = store.drive(set_options(store, topic, options))
    if (said := warning(topic, encoded)) is not None:
        click.echo(f"lisa: warning: {said}", err=True)
    print_result(chosen, topic, f"{changed} changed", changed=changed > 0)


@topic.command()
@click.argument("topic")
@click.argument("names", metavar="KEY...", nargs=-1, required=True)
@common
def unset(chosen: Chosen, topic: str, names: tuple[str, ...]) -> None:
    """Reset options to their defaults, or to the YAML values of a manager at its next start."""
    from lisa.admin.topics import unset_options

    store = store_with_topic(chosen, topic)
    changed = store.drive(unset_options(store, topic, names))
    print_result(chosen, topic, f"{changed} changed", changed=changed > 0)
