"""`lisa list`, and what it shares with `lisa garbage list`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, Moment, common, together
from lisa.cli.output import distance, iso, local, print_json, print_table
from lisa.cli.topic_output import store_with_topic
from lisa.core.model.clock import datetime_ms

if TYPE_CHECKING:
    from lisa.admin.messages import MessagePage, Row
    from lisa.core.redis.flow import Flow
    from lisa.core.store.store import SyncStore

SHOWN: dict[str, tuple[str, ...]] = {
    "waiting": (),
    "ready": ("group", "attempts "),
    "in_flight": ("group", "attempts ", "consumer"),
    "retry": ("group", "attempts ", "reason"),
    "garbage": ("group", "attempts ", "reason"),
}
"""The states of messages, and what a table shows of each beside id and due time."""

ROWS_PER_STEP = 1_000


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
    type=Moment(),
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
    from lisa.admin.messages import LiveState, list_messages

    store = store_with_topic(chosen, topic)
    before_ms = datetime_ms(due_before.astimezone()) if due_before else None
    read = partial(
        list_messages, store, topic, LiveState(state), group=group, due_before_ms=before_ms
    )
    rows = ListedRows(store, read, cursor, limit)
    if chosen.json:
        fields = [row_fields(row) for row in rows]
        print_json({"topic": topic, "state": state, "messages": fields, "cursor": rows.cursor})
        return
    now_ms = store.drive(store.server_time_ms())
    columns = ["id", "due", "at", *SHOWN[state]]
    shown = ([_cells(row, now_ms)[name] for name in columns] for row in rows)
    print_table(columns, shown, drop=["at", "attempts", "group"])
    rows.print_cursor()


def _cells(row: Row, now_ms: int) -> dict[str, object]:
    """The cells of a row by column."""
    return {
        "id": row.id,
        "due": distance(row.due_ms, now_ms),
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
        read: Callable[..., Flow[MessagePage]],
        cursor: str | None,
        limit: int,
    ) -> None:
        self._store = store
        self._read = read
        self.cursor = cursor
        self._limit = limit

    def __iter__(self) -> Iterator[Row]:
        while self._limit > 0:
            wanted = min(self._limit, ROWS_PER_STEP)
            page = self._store.drive(self._read(cursor=self.cursor, limit=wanted))
            self.cursor = page.cursor
            self._limit -= len(page.rows)
            yield from page.rows
            if page.cursor is None:
                return

    def print_cursor(self) -> None:
        """Print the option that continues the list, if there is more."""
        if self.cursor is not None:
            click.echo(f"more: --cursor {shlex.quote(self.cursor)}", err=True)


def row_fields(row: Row) -> dict[str, Any]:
    """The fields of one row for JSON output."""
    return {
        "id": row.id,
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
