"""`lisa key`: commands for all messages of a key, and for its limits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from lisa import admin
from lisa.cli.messages import answer, document, page_options
from lisa.cli.options import Chosen, check_zone, common, due_options, together
from lisa.cli.output import distance, local, print_json, print_table
from lisa.cli.topics import print_result, store_with_topic
from lisa.core.model.clock import datetime_ms, parse_zone
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import shown_id
from lisa.core.model.lanes import MAX_BURST, MAX_COUNT, MAX_WEIGHT, KeyLimits

if TYPE_CHECKING:
    from lisa.producer import KeyOutcome


@click.group()
def key() -> None:
    """List, cancel, reschedule or limit the messages of a key."""


_topic_and_key = together(click.argument("topic"), click.argument("key"))


@key.command("list")
@_topic_and_key
@common
def list_(chosen: Chosen, topic: str, key: str) -> None:
    """List the live messages of KEY, by due time."""
    messages = chosen.producer().list_key(topic, key)
    if chosen.json:
        print_json({"topic": topic, "key": key, "messages": list(map(document, messages))})
        return
    now_ms = chosen.server_ms()
    rows = (
        [shown_id(each.id), str(each.state), distance(each.due_ms, now_ms), local(each.due_ms)]
        for each in messages
    )
    print_table(["id", "state", "due", "at"], rows, drop=["at"])


@key.command()
@_topic_and_key
@common
def count(chosen: Chosen, topic: str, key: str) -> None:
    """Print how many live messages KEY has."""
    found = chosen.producer().count_key(topic, key)
    chosen.answer({"topic": topic, "key": key, "count": found}, str(found))


@key.command()
@_topic_and_key
@common
def cancel(chosen: Chosen, topic: str, key: str) -> None:
    """Cancel all messages of KEY permanently. Exit code 1 unless all were cancelled.

    Prints the outcomes as `lisa cancel` does. Running it again continues after an error.
    """
    producer = chosen.producer()
    _change(chosen, topic, partial(producer.cancel_key, topic, key), "cancelled")


@key.command()
@_topic_and_key
@due_options
@click.option("--shift", metavar="DURATION", help="Move waiting messages by this: 1h, -30m.")
@common
def reschedule(
    chosen: Chosen, topic: str, key: str, *, at: datetime | None, tz: str | None, **given: Any
) -> None:
    """Change the due times of all messages of KEY with --delay, --at, --at-ms or --shift.

    Exit code 1 unless all were rescheduled; for others, prints why, or with --shift their state.
    """
    producer = chosen.producer()
    check_zone(chosen, at, tz)
    if at is not None and tz is not None:
        if given["at_ms"] is not None:
            raise click.UsageError("give one of --at and --at-ms")
        given["at_ms"], at = datetime_ms(at, parse_zone(tz)), None
    move = partial(producer.reschedule_key, topic, key, at=at, **given)
    _change(chosen, topic, move, "rescheduled")


@key.command()
@_topic_and_key
@common
def fire(chosen: Chosen, topic: str, key: str) -> None:
    """Make all messages of KEY due now. Exit code 1 unless all were rescheduled."""
    producer = chosen.producer()
    _change(chosen, topic, partial(producer.fire_key, topic, key), "rescheduled")


@key.command()
@_topic_and_key
@click.option("--rate", help="Maximum rate: 2/s, 10/m, 5 per 90s.")
@click.option(
    "--burst", type=click.IntRange(1, MAX_BURST), help="How many may start at once; needs --rate."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, MAX_COUNT),
    help="Maximum messages that are ready or in flight at once.",
)
@click.option(
    "--weight",
    type=click.IntRange(1, MAX_WEIGHT),
    help="Share of the turns with the option fair. Default: 1.",
)
@click.option("--group", help="Limit KEY in this group only. Default: in all groups.")
@click.option("--clear", is_flag=True, help="Remove the limits of KEY.")
@common
def limit(
    chosen: Chosen,
    topic: str,
    key: str,
    *,
    rate: str | None,
    burst: int | None,
    concurrency: int | None,
    weight: int | None,
    group: str | None,
    clear: bool,
) -> None:
    """Set the limits of KEY, in place of those of TOPIC; without options, show them.

    The given limits replace all that were set for KEY before. Those for a group take precedence
    over those for all groups.
    """
    if burst is not None and rate is None:
        raise click.UsageError("--burst needs --rate")
    given = KeyLimits.parse(rate, concurrency, weight)
    if given.rate and burst is not None:
        given = replace(given, rate=replace(given.rate, burst=burst).check())
    if clear and given != KeyLimits():
        raise click.UsageError("--clear takes no limits")
    store = store_with_topic(chosen, topic)
    if clear or given != KeyLimits():
        changed = store.drive(admin.limits.set_limits(store, topic, key, given, group))
        said = f"limits of key {key} are {'removed' if clear else 'set'}"
        print_result(chosen, topic, said, changed=changed)
        return
    found = store.drive(admin.limits.limits_of(store, topic, key, group))
    row = _fields(admin.limits.LimitedKey(key, group, found))
    if chosen.json:
        print_json({"topic": topic, **row})
    else:
        print_table(["", ""], [(name, _shown(value)) for name, value in row.items()])


@key.command()
@click.argument("topic")
@page_options
@common
def limits(chosen: Chosen, topic: str, *, cursor: str | None, limit: int) -> None:
    """List the keys of TOPIC that have limits of their own: those for all groups, then by group."""
    store = store_with_topic(chosen, topic)
    page = store.drive(admin.limits.limited_keys(store, topic, cursor=cursor, limit=limit))
    rows = [_fields(each) for each in page.keys]
    if chosen.json:
        print_json({"topic": topic, "keys": rows, "cursor": page.cursor})
        return
    columns = ["key", "group", "rate", "concurrency ", "weight "]
    print_table(columns, [[_shown(value) for value in row.values()] for row in rows])
    if page.cursor is not None:
        click.echo(f"more: --cursor {shlex.quote(page.cursor)}", err=True)


def _fields(each: admin.limits.LimitedKey) -> dict[str, Any]:
    rate = each.limits.rate and str(each.limits.rate)
    return {
        "key": each.key,
        "group": each.group,
        "rate": rate,
        "concurrency": each.limits.concurrency,
        "weight": each.limits.weight,
    }


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _change(
    chosen: Chosen, topic: str, change: Callable[[], Sequence[KeyOutcome]], good: str
) -> None:
    """Change messages and print their outcomes. An error says how many were handled before."""
    try:
        outcomes = change()
    except LisaError as error:
        if error.outcomes:
            error.args = (f"{error}; {len(error.outcomes)} messages were handled before",)
        raise
    answer(chosen, topic, {each.id: str(each.outcome) for each in outcomes}, good)
