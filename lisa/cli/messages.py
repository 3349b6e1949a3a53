"""`lisa get`, `why`, `cancel`, `reschedule`, `fire` and `list`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lisa import admin
from lisa.cli.options import (
    Chosen,
    check_zone,
    common,
    due_options,
    key_option,
    local_options,
    moment,
    together,
    whole_id,
)
from lisa.cli.output import (
    body_fields,
    distance,
    fail,
    iso,
    local,
    print_json,
    print_table,
    printable,
    when,
)
from lisa.cli.topics import store_with_topic
from lisa.core.model.clock import datetime_ms, duration_ms, human
from lisa.core.model.keys import shown_id
from lisa.core.model.sharding import key_of
from lisa.core.store.inspection import FoundInGroup, FoundMessage

if TYPE_CHECKING:
    from lisa.core.redis.flow import Flow
    from lisa.core.store.store import SyncStore

SHOWN: dict[str, tuple[str, ...]] = {
    "waiting": (),
    "ready": ("group", "attempts "),
    "in_flight": ("group", "attempts ", "consumer"),
    "parked": ("group", "attempts "),
    "retry": ("group", "attempts ", "reason"),
    "garbage": ("group", "attempts ", "reason"),
}
"""The states of messages, and what a table shows of each beside id and due time."""

ROWS_PER_STEP = 1_000


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@key_option
@common
def get(chosen: Chosen, topic: str, message_id: str, key: str | None) -> None:
    """Show the state of a message in every group. Exit code 1 if the id is unknown.

    Settled messages are shown until the topic's retention period ends.
    """
    message_id = whole_id(key, message_id)
    found = chosen.producer().get(topic, message_id)
    if found is None:
        if not chosen.json:
            fail(f"{shown_id(message_id)} is unknown on topic {topic}")
        print_json({"topic": topic, "id": message_id, "state": None})
        raise click.exceptions.Exit(1)
    if chosen.json:
        print_json(document(found))
    else:
        _show(found, chosen.server_ms())


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@key_option
@common
def why(chosen: Chosen, topic: str, message_id: str, key: str | None) -> None:
    """Say why a message is not running now: one sentence for each group that owes it.

    Exit code 1 if the id is unknown.
    """
    message_id, store = whole_id(key, message_id), chosen.store()
    reasons = store.drive(admin.why.why(store, topic, message_id))
    if chosen.json:
        print_json({"topic": topic, "id": message_id, "reasons": list(map(asdict, reasons))})
    for reason in () if chosen.json else reasons:
        click.echo(f"{reason.group}: {reason.sentence}" if len(reasons) > 1 else reason.sentence)
    if not reasons and not chosen.json:
        fail(f"{shown_id(message_id)} is unknown on topic {topic}")
    if not reasons:
        raise click.exceptions.Exit(1)


def _group_fields(in_group: FoundInGroup) -> dict[str, Any]:
    return {
        "state": str(in_group.state),
        "due": iso(in_group.due_ms),
        "due_ms": in_group.due_ms,
        "attempts": in_group.attempts,
        "deferrals": in_group.deferrals,
        "consumer": in_group.consumer,
        "idle_ms": None if in_group.idle is None else duration_ms(in_group.idle),
        "reason": in_group.reason,
        "traceback": in_group.traceback,
    }


def document(found: FoundMessage) -> dict[str, Any]:
    """A message for JSON output."""
    return {
        "topic": found.topic,
        "id": found.id,
        "key": found.key,
        **_group_fields(found),
        "headers": found.headers,
        **body_fields(found.body),
        "groups": {name: _group_fields(in_group) for name, in_group in found.groups.items()},
    }


def _show(found: FoundMessage, now_ms: int) -> None:
    idle = None if found.idle is None else human(duration_ms(found.idle))
    rows: list[tuple[str, object]] = [
        ("id", shown_id(found.id)),
        ("topic", found.topic),
        ("state", str(found.state)),
        ("due", when(found.due_ms, now_ms)),
        ("attempts", found.attempts),
    ]
    rows += [(f"header {name}", value) for name, value in found.headers.items()]
    for name, value in (
        ("consumer", found.consumer),
        ("idle", idle),
        ("deferrals", found.deferrals or None),
        ("reason", found.reason),
        ("traceback", found.traceback),
        ("body", shown_body(found.body)),
    ):
        if value is not None:
            rows.append((name, value))
    print_table(["", ""], rows)
    if len(found.groups) > 1:
        print_table(
            ["group", "state", "due", "attempts ", "reason"],
            [
                (name, str(one.state), when(one.due_ms, now_ms), one.attempts, one.reason)
                for name, one in found.groups.items()
            ],
        )


def shown_body(body: Any) -> str | None:
    """A body as readable text, cut after 2,000 characters."""
    if body is None:
        return None
    text = body if isinstance(body, str) else None
    if text is None:
        text = repr(body) if isinstance(body, bytes) else msgspec.json.encode(body).decode()
    return text if len(text) <= 2_000 else f"{text[:2_000]} ... ({len(text)} characters)"


@click.command()
@click.argument("topic")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@key_option
@common
def cancel(chosen: Chosen, topic: str, ids: tuple[str, ...], key: str | None) -> None:
    """Cancel messages permanently. Exit code 1 unless all were cancelled.

    Prints each message's outcome: cancelled, or in_flight, done or unknown if it is unchanged.
    """
    named = [whole_id(key, message_id) for message_id in ids]
    outcomes = chosen.producer().cancel_many(topic, named)
    answer(chosen, topic, dict(zip(named, map(str, outcomes), strict=True)), "cancelled")


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@key_option
@due_options
@local_options
@common
def reschedule(chosen: Chosen, topic: str, message_id: str, *, key: str | None, **due: Any) -> None:
    """Change the due time of a message with --delay, --at, --at-ms or --at-local.

    Exit code 1 if the message can no longer be rescheduled.
    """
    if all(due[name] is None for name in ("delay", "at", "at_ms", "at_local")):
        raise click.UsageError("give one of --delay, --at, --at-ms and --at-local")
    producer = chosen.producer()
    check_zone(chosen, due["at"], due["tz"])
    message_id = whole_id(key, message_id)
    outcome = producer.reschedule(topic, message_id, **due)
    answer(chosen, topic, {message_id: str(outcome)}, "rescheduled")


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@key_option
@common
def fire(chosen: Chosen, topic: str, message_id: str, key: str | None) -> None:
    """Make a message due now. Exit code 1 if the message can no longer be rescheduled."""
    message_id = whole_id(key, message_id)
    outcome = chosen.producer().fire_now(topic, message_id)
    answer(chosen, topic, {message_id: str(outcome)}, "rescheduled")


def answer(chosen: Chosen, topic: str, outcomes: Mapping[str, str], good: str) -> None:
    """Print the outcome of each message; ends with exit code 1 unless all are `good`."""
    if chosen.json:
        rows = [
            {"id": message_id, "key": key_of(message_id), "outcome": outcome}
            for message_id, outcome in outcomes.items()
        ]
        print_json({"topic": topic, "messages": rows})
    else:
        for message_id, outcome in outcomes.items():
            click.echo(f"{printable(shown_id(message_id))}  {outcome}")
    if any(outcome != good for outcome in outcomes.values()):
        raise click.exceptions.Exit(1)


page_options = together(
    click.option("--cursor", help="Cursor printed with the previous page."),
    click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True),
)


@click.command("list")
@click.argument("topic")
@click.option("--state", type=click.Choice(list(SHOWN)), default="waiting", show_default=True)
@click.option("--group", help="Only this group. Default: all groups.")
@click.option(
    "--due-before",
    type=moment,
    metavar="ISO",
    help="Only messages due before this time (garbage: dead before it).",
)
@page_options
@common
def list_(
    chosen: Chosen,
    topic: str,
    *,
    state: str,
    group: str | None,
    due_before: datetime | None,
    cursor: str | None,
    limit: int,
) -> None:
    """List messages of TOPIC in one state, by due time or in order of delivery.

    A time without an offset is in the local time zone. Long lists are read in small steps that do
    not block the server, and printed as they are read. Exit code 1 if the topic is unknown.
    """
    store = store_with_topic(chosen, topic)
    before_ms = datetime_ms(due_before.astimezone()) if due_before else None
    read = partial(
        admin.messages.list_messages,
        store,
        topic,
        admin.messages.LiveState(state),
        group=group,
        due_before_ms=before_ms,
    )
    rows = ListedRows(store, read, cursor, limit)
    if chosen.json:
        fields = [row_fields(row) for row in rows]
        print_json({"topic": topic, "state": state, "messages": fields, "cursor": rows.cursor})
        return
    rows.print_table(["id", "due", "at", *SHOWN[state]], drop=["at", "attempts", "group"])


def _cells(row: admin.messages.Row, now_ms: int) -> dict[str, object]:
    """The cells of a row by column."""
    return {
        "id": shown_id(row.id),
        "due": distance(row.due_ms, now_ms),
        "died": distance(row.due_ms, now_ms),
        "at": local(row.due_ms),
        "group": row.group,
        "attempts ": row.attempts,
        "consumer": row.consumer,
        "reason": row.reason,
    }


class ListedRows:
    """The rows of a long list, read in steps while they are printed.

    read: the flow that returns the page after a cursor, with at most `limit` rows.
    cursor: where the next page begins, after the iteration; None at the end of the list.
    """

    def __init__(
        self,
        store: SyncStore,
        read: Callable[..., Flow[admin.messages.MessagePage]],
        cursor: str | None,
        limit: int,
    ) -> None:
        self._store = store
        self._read = read
        self.cursor = cursor
        self._limit = limit

    def __iter__(self) -> Iterator[admin.messages.Row]:
        while self._limit > 0:
            wanted = min(self._limit, ROWS_PER_STEP)
            page = self._store.drive(self._read(cursor=self.cursor, limit=wanted))
            self.cursor = page.cursor
            self._limit -= len(page.rows)
            yield from page.rows
            if page.cursor is None:
                return

    def print_table(self, columns: Sequence[str], *, drop: Sequence[str]) -> None:
        """Print the rows, and the option that continues the list if there is more."""
        now_ms = self._store.drive(self._store.server_time_ms())
        print_table(
            columns, ([_cells(row, now_ms)[name] for name in columns] for row in self), drop=drop
        )
        if self.cursor is not None:
            click.echo(f"more: --cursor {shlex.quote(self.cursor)}", err=True)


def row_fields(row: admin.messages.Row) -> dict[str, Any]:
    """The fields of one row for JSON output."""
    return {
        "id": row.id,
        "key": key_of(row.id),
        "topic": row.topic,
        "state": str(row.state),
        "group": row.group,
        "due": iso(row.due_ms),
        "due_ms": row.due_ms,
        "attempts": row.attempts,
        "deferrals": row.deferrals,
        "consumer": row.consumer,
        "idle_ms": row.idle_ms,
        "reason": row.reason,
        "traceback": row.traceback,
        "expires": iso(row.expires_ms),
    }
