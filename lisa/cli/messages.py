"""`lisa get`, `list`, `cancel`, `reschedule` and `fire`."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import (
    Chosen,
    Moment,
    check_zone,
    common,
    due_options,
    pass_chosen,
)

if TYPE_CHECKING:
    from lisa.admin.messages import Row
    from lisa.producer.found import FoundInGroup, FoundMessage

__all__ = ["cancel", "fire", "get", "list_", "reschedule", "row_fields"]

STATES = ("waiting", "ready", "in_flight", "retry", "garbage")


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@common
@pass_chosen
def get(chosen: Chosen, topic: str, message_id: str) -> None:
    """Show where a message stands, in every group. Exit code 1 if the id is unknown.

    A settled message is remembered for the topic's retention.
    """
    from lisa.cli.output import print_json

    found = chosen.producer().get(topic, message_id)
    if found is None:
        if chosen.json:
            print_json({"topic": topic, "id": message_id, "state": None})
        else:
            click.echo(f"lisa: {message_id} is unknown on topic {topic}", err=True)
        raise click.exceptions.Exit(1)
    if chosen.json:
        print_json(_document(found))
    else:
        _show(found)


def _group_fields(place: FoundInGroup) -> dict[str, Any]:
    from lisa.cli.output import iso

    idle = place.idle
    return {
        "state": str(place.state), "due": iso(place.due_ms), "due_ms": place.due_ms,
        "attempts": place.attempts, "consumer": place.consumer,
        "idle_ms": None if idle is None else idle // timedelta(milliseconds=1),
        "reason": place.reason,
    }  # fmt: skip


def _document(found: FoundMessage) -> dict[str, Any]:
    from lisa.cli.output import body_fields

    return {
        "topic": found.topic, "id": found.id, **_group_fields(found), "headers": found.headers,
        **body_fields(found.body),
        "groups": {name: _group_fields(place) for name, place in found.groups.items()},
    }  # fmt: skip


def _show(found: FoundMessage) -> None:
    from lisa.cli.output import print_table, when
    from lisa.core.clock import human

    now_ms = time.time_ns() // 1_000_000
    idle = None if found.idle is None else human(found.idle // timedelta(milliseconds=1))
    rows: list[tuple[str, object]] = [
        ("id", found.id), ("topic", found.topic), ("state", str(found.state)),
        ("due", when(found.due_ms, now_ms)), ("attempts", found.attempts),
    ]  # fmt: skip
    rows += [(f"header {name}", value) for name, value in found.headers.items()]
    for name, value in (
        ("consumer", found.consumer), ("idle", idle), ("reason", found.reason),
        ("body", shown_body(found.body)),
    ):  # fmt: skip
        if value is not None:
            rows.append((name, value))
    print_table(["", ""], rows)
    if len(found.groups) > 1:
        print_table(
            ["group", "state", "due", "attempts ", "reason"],
            [(name, str(place.state), when(place.due_ms, now_ms), place.attempts, place.reason)
             for name, place in found.groups.items()],
        )  # fmt: skip


def shown_body(body: Any) -> str | None:
    """A body for people, cut where it is long."""
    import msgspec

    if body is None:
        return None
    text = body if isinstance(body, str) else None
    if text is None:
        text = repr(body) if isinstance(body, bytes) else msgspec.json.encode(body).decode()
    return text if len(text) <= 2_000 else f"{text[:2_000]} ... ({len(text)} characters)"


@click.command("list")
@click.argument("topic")
@click.option("--state", type=click.Choice(STATES), default="waiting", show_default=True)
@click.option("--group", help="Only this group's; by default those of all.")
@click.option(
    "--due-before",
    type=Moment(),
    metavar="ISO",
    help="Only those due before this time (garbage: that died before it).",
)
@click.option("--cursor", help="Where the list before this one ended.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@common
@pass_chosen
def list_(
    chosen: Chosen, topic: str, *, state: str, group: str | None, due_before: datetime | None,
    cursor: str | None, limit: int,
) -> None:  # fmt: skip
    """List messages of TOPIC in one state, by due time, or in order of delivery.

    A time without an offset is read in the local zone. Reads in bounded steps, however long the
    list is.
    """
    from lisa.admin.messages import State, list_messages
    from lisa.cli.output import print_json, print_table, when
    from lisa.core.clock import datetime_ms

    store = chosen.store()
    page = store.drive(
        list_messages(
            store, topic, State(state), group=group, cursor=cursor, limit=limit,
            due_before_ms=datetime_ms(due_before.astimezone()) if due_before else None,
        )
    )  # fmt: skip
    if chosen.json:
        rows = [row_fields(row) for row in page.rows]
        print_json({"topic": topic, "state": state, "messages": rows, "cursor": page.cursor})
        return
    now_ms = store.drive(store.server_time_us()) // 1000
    print_table(
        ["id", "due", "group", "attempts ", "consumer", "reason"],
        [(row.id, when(row.due_ms, now_ms), row.group, row.attempts, row.consumer, row.reason)
         for row in page.rows],
    )  # fmt: skip
    if page.cursor is not None:
        click.echo(f"more: --cursor '{page.cursor}'", err=True)


def row_fields(row: Row) -> dict[str, Any]:
    """One row of a list, for programs."""
    from lisa.cli.output import iso

    return {
        "id": row.id, "topic": row.topic, "state": str(row.state), "group": row.group,
        "due": iso(row.due_ms), "due_ms": row.due_ms, "attempts": row.attempts,
        "consumer": row.consumer, "idle_ms": row.idle_ms, "reason": row.reason,
        "expires": iso(row.expires_ms),
    }  # fmt: skip


@click.command()
@click.argument("topic")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@common
@pass_chosen
def cancel(chosen: Chosen, topic: str, ids: tuple[str, ...]) -> None:
    """Take messages back for good. Exit code 1 unless all were cancelled.

    The answer for each is the truth: cancelled, or nothing was changed as it is in_flight, done
    or unknown.
    """
    outcomes = chosen.producer().cancel_many(topic, ids)
    _answer(chosen, topic, dict(zip(ids, map(str, outcomes), strict=True)), "cancelled")


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@due_options
@common
@pass_chosen
def reschedule(
    chosen: Chosen, topic: str, message_id: str, *, delay: timedelta | None, at: datetime | None,
    at_ms: int | None, tz: str | None,
) -> None:  # fmt: skip
    """Give a message a new due time, by --delay, --at or --at-ms.

    Exit code 1 if it was too late for that.
    """
    if delay is None and at is None and at_ms is None:
        raise click.UsageError("give one of --delay, --at and --at-ms")
    producer = chosen.producer()
    check_zone(chosen, at, tz)
    outcome = producer.reschedule(topic, message_id, delay=delay, at=at, at_ms=at_ms, tz=tz)
    _answer(chosen, topic, {message_id: str(outcome)}, "rescheduled")


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@common
@pass_chosen
def fire(chosen: Chosen, topic: str, message_id: str) -> None:
    """Make a message due now. Exit code 1 if it was too late."""
    outcome = chosen.producer().fire_now(topic, message_id)
    _answer(chosen, topic, {message_id: str(outcome)}, "rescheduled")


def _answer(chosen: Chosen, topic: str, outcomes: dict[str, str], good: str) -> None:
    from lisa.cli.output import print_json, printable

    if chosen.json:
        rows = [{"id": one, "outcome": outcome} for one, outcome in outcomes.items()]
        print_json({"topic": topic, "messages": rows})
    else:
        for one, outcome in outcomes.items():
            click.echo(f"{printable(one)}  {outcome}")
    if any(outcome != good for outcome in outcomes.values()):
        raise click.exceptions.Exit(1)
