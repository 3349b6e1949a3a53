"""`lisa garbage`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from lisa import admin
from lisa.cli.messages import ListedRows, page_options, row_fields, shown_body
from lisa.cli.options import Chosen, common, duration, key_option, together, whole_id
from lisa.cli.output import (
    body_fields,
    confirm,
    counting,
    iso,
    print_json,
    print_table,
    when,
)
from lisa.cli.topics import store_with_topic
from lisa.core.model.clock import duration_ms
from lisa.core.model.keys import shown_id
from lisa.core.store.inspection import FoundInGroup, FoundMessage

if TYPE_CHECKING:
    from lisa.core.store.store import SyncStore


@click.group()
def garbage() -> None:
    """List, requeue or purge dead messages (dead letters)."""


_filters = together(
    click.option("--group", help="Only this group. Default: all groups."),
    click.option(
        "--older-than",
        type=duration,
        metavar="DURATION",
        help="Only messages that died longer ago than this.",
    ),
    click.option("--reason", metavar="TEXT", help="Only messages whose reason contains this text."),
)
_ids_or_all = together(
    click.argument("ids", metavar="[ID]...", nargs=-1),
    key_option,
    click.option("--all", "everything", is_flag=True, help="All matching messages."),
)


def _selection(
    store: SyncStore,
    topic: str,
    *,
    group: str | None,
    older_than: timedelta | None,
    reason: str | None,
) -> admin.garbage.GarbageSelection:
    """The messages that the options of `_filters` select."""
    before = None
    if older_than is not None:
        before = store.drive(store.server_time_ms()) - duration_ms(older_than)
    return admin.garbage.GarbageSelection(
        topic=topic, group=group, died_before_ms=before, reason=reason
    )


@garbage.command("list")
@click.argument("topic")
@_filters
@page_options
@common
def list_(chosen: Chosen, /, topic: str, *, cursor: str | None, limit: int, **filters: Any) -> None:
    """List dead messages with their reasons, oldest first."""
    store = store_with_topic(chosen, topic)
    selection = _selection(store, topic, **filters)
    rows = ListedRows(store, partial(admin.garbage.listed, store, selection), cursor, limit)
    if chosen.json:
        fields = [_died(row_fields(row)) for row in rows]
        print_json({"topic": topic, "messages": fields, "cursor": rows.cursor})
        return
    columns = ["id", "group", "died", "at", "attempts ", "reason"]
    rows.print_table(columns, drop=["at", "attempts"])


def _died(row: dict[str, Any]) -> dict[str, Any]:
    """Rename the due time: in garbage, `due` is the time of death."""
    row["died"], row["died_ms"] = row.pop("due"), row.pop("due_ms")
    return row


@garbage.command()
@click.argument("topic")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@key_option
@click.option("--group", help="Only this group. Default: all groups.")
@common
def show(
    chosen: Chosen, topic: str, ids: tuple[str, ...], *, key: str | None, group: str | None
) -> None:
    """Show dead messages in full, with traceback. Exit code 1 if one is not in garbage."""
    producer = chosen.producer()
    named = [whole_id(key, own_id) for own_id in ids]
    dead = [(message_id, _dead(producer.get(topic, message_id), group)) for message_id in named]
    found = [in_group for _, own in dead for in_group in own]
    if chosen.json:
        print_json(
            [
                {
                    "topic": topic,
                    "id": message.id,
                    "key": message.key,
                    "group": name,
                    "died": iso(in_group.due_ms),
                    "died_ms": in_group.due_ms,
                    "attempts": in_group.attempts,
                    "reason": in_group.reason,
                    "traceback": in_group.traceback,
                    "headers": message.headers,
                    **body_fields(message.body),
                }
                for message, name, in_group in found
            ]
        )
    else:
        now_ms = chosen.server_ms()
        for message, name, in_group in found:
            print_table(
                ["", ""],
                [
                    ("id", shown_id(message.id)),
                    ("group", name),
                    ("died", when(in_group.due_ms, now_ms)),
                    ("attempts", in_group.attempts),
                    ("reason", in_group.reason),
                    *([("traceback", in_group.traceback)] if in_group.traceback else []),
                    *((f"header {key}", value) for key, value in message.headers.items()),
                    ("body", shown_body(message.body)),
                ],
            )
    _fail_for(topic, [message_id for message_id, own in dead if not own])


def _dead(
    message: FoundMessage | None, group: str | None
) -> list[tuple[FoundMessage, str, FoundInGroup]]:
    """The message with each group in which it is dead."""
    if message is None:
        return []
    return [
        (message, name, in_group)
        for name, in_group in message.groups.items()
        if in_group.state == "garbage" and group in (None, name)
    ]


def _fail_for(topic: str, missing: Sequence[str]) -> None:
    for message_id in missing:
        click.echo(f"lisa: {shown_id(message_id)} is not in garbage of topic {topic}", err=True)
    if missing:
        raise click.exceptions.Exit(1)


@garbage.command()
@click.argument("topic")
@_ids_or_all
@_filters
@common
def requeue(
    chosen: Chosen,
    /,
    topic: str,
    ids: tuple[str, ...],
    *,
    key: str | None,
    everything: bool,
    **filters: Any,
) -> None:
    """Requeue dead messages: they become due now and their failed attempts are reset.

    Exit code 1 if one of the ids is not in garbage.
    """
    named = _checked_choice(ids, key, filters, everything=everything)
    store = store_with_topic(chosen, topic)
    selection = _selection(store, topic, **filters)
    _apply(chosen, store, selection, named, verb="requeued", action=admin.garbage.requeue)


@garbage.command()
@click.argument("topic")
@_ids_or_all
@_filters
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common
def purge(
    chosen: Chosen,
    /,
    topic: str,
    ids: tuple[str, ...],
    *,
    key: str | None,
    everything: bool,
    yes: bool,
    **filters: Any,
) -> None:
    """Delete dead messages permanently. Exit code 1 if one of the ids is not in garbage."""
    named = _checked_choice(ids, key, filters, everything=everything)
    store = store_with_topic(chosen, topic)
    selection = _selection(store, topic, **filters)
    count = len(ids) if ids else store.drive(admin.garbage.matching(store, selection))
    if count:
        confirm(f"Permanently delete {count} dead messages of {topic}?", yes=yes)
    _apply(chosen, store, selection, named, verb="purged", action=admin.garbage.purge)


def _checked_choice(
    ids: tuple[str, ...], key: str | None, filters: dict[str, Any], *, everything: bool
) -> Sequence[str]:
    """The whole ids, none for --all. Raises UsageError."""
    if bool(ids) == everything:
        raise click.UsageError("give either ids or --all")
    if ids and (filters["older_than"] or filters["reason"]):
        raise click.UsageError("--older-than and --reason only work with --all; omit the ids")
    if key is not None and everything:
        raise click.UsageError("--key only works with ids; omit --all")
    return [whole_id(key, own_id) for own_id in ids]


def _apply(
    chosen: Chosen,
    store: SyncStore,
    selection: admin.garbage.GarbageSelection,
    ids: Sequence[str],
    *,
    verb: str,
    action: admin.garbage.Action,
) -> None:

    missing: list[str] = []
    if ids:
        done, missing = store.drive(admin.garbage.act_on(store, selection, ids, action))
    else:
        with counting(verb) as progress:
            done = store.drive(admin.garbage.act(store, selection, action, progress=progress))
    document = {"topic": selection.topic, verb: done, "not_in_garbage": missing}
    chosen.answer(document, f"{selection.topic}  {done} {verb}")
    _fail_for(selection.topic, missing)
