"""`lisa key`: commands for all messages of a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.messages import answer, document
from lisa.cli.options import Chosen, check_zone, common, due_options, together
from lisa.cli.output import distance, local, print_json, print_table
from lisa.core.model.clock import datetime_ms, parse_zone
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import shown_id

if TYPE_CHECKING:
    from lisa.producer import KeyOutcome


@click.group()
def key() -> None:
    """List, cancel or reschedule all messages of a key."""


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
