"""`lisa garbage`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lisa.cli.options import Chosen, Duration, common, pass_chosen

if TYPE_CHECKING:
    from lisa.admin.garbage import Selection
    from lisa.core.flow import Flow
    from lisa.core.store import Store, SyncStore

__all__ = ["garbage"]

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def garbage() -> None:
    """Look through dead messages, requeue or purge them."""


def _filters(command: F) -> F:
    for option in (
        click.option("--reason", metavar="TEXT", help="Only those whose reason holds this text."),
        click.option("--older-than", type=Duration(), metavar="DURATION",
                     help="Only those that died longer ago."),
        click.option("--group", help="Only this group's; by default those of all."),
    ):  # fmt: skip
        command = option(command)
    return command


def _selection(
    store: SyncStore, topic: str, group: str | None, older_than: timedelta | None,
    reason: str | None,
) -> Selection:  # fmt: skip
    from lisa.admin.garbage import Selection
    from lisa.core.clock import duration_ms

    before = None
    if older_than is not None:
        before = store.drive(store.server_time_us()) // 1000 - duration_ms(older_than)
    return Selection(topic=topic, group=group, died_before_ms=before, reason=reason)


@garbage.command("list")
@click.argument("topic")
@_filters
@click.option("--cursor", help="Where the list before this one ended.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@common
@pass_chosen
def list_(
    chosen: Chosen, topic: str, *, group: str | None, older_than: timedelta | None,
    reason: str | None, cursor: str | None, limit: int,
) -> None:  # fmt: skip
    """List dead messages, the oldest first, with the reason of each."""
    from lisa.admin.garbage import listed
    from lisa.cli.messages import row_fields
    from lisa.cli.output import print_json, print_table, when

    store = chosen.store()
    selection = _selection(store, topic, group, older_than, reason)
    found = store.drive(listed(store, selection, cursor=cursor, limit=limit))
    if chosen.json:
        rows = [_died(row_fields(row)) for row in found.rows]
        print_json({"topic": topic, "messages": rows, "cursor": found.cursor})
        return
    now_ms = store.drive(store.server_time_us()) // 1000
    print_table(
        ["id", "group", "died", "attempts ", "reason"],
        [(row.id, row.group, when(row.due_ms, now_ms), row.attempts, row.reason)
         for row in found.rows],
    )  # fmt: skip
    if found.cursor is not None:
        click.echo(f"more: --cursor '{found.cursor}'", err=True)


def _died(row: dict[str, Any]) -> dict[str, Any]:
    """In garbage there is no due time any more: what stands there is the time of death."""
    row["died"], row["died_ms"] = row.pop("due"), row.pop("due_ms")
    return row


@garbage.command()
@click.argument("topic")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--group", help="Only this group's; by default those of all.")
@common
@pass_chosen
def show(chosen: Chosen, topic: str, ids: tuple[str, ...], group: str | None) -> None:
    """Show dead messages whole: body, headers, reason. Exit code 1 if one is not in garbage."""
    from lisa.cli.messages import shown_body
    from lisa.cli.output import body_fields, iso, print_json, print_table, when

    producer = chosen.producer()
    found, missing = [], []
    for one in ids:
        message = producer.get(topic, one)
        places = {} if message is None else {
            name: place for name, place in message.groups.items()
            if place.state == "garbage" and group in (None, name)
        }  # fmt: skip
        if message is None or not places:
            missing.append(one)
            continue
        found += [(message, name, place) for name, place in places.items()]
    if chosen.json:
        print_json([
            {"topic": topic, "id": message.id, "group": name, "died": iso(place.due_ms),
             "died_ms": place.due_ms, "attempts": place.attempts, "reason": place.reason,
             "headers": message.headers, **body_fields(message.body)}
            for message, name, place in found
        ])  # fmt: skip
    else:
        now_ms = _now_ms()
        for message, name, place in found:
            print_table(["", ""], [
                ("id", message.id), ("group", name), ("died", when(place.due_ms, now_ms)),
                ("attempts", place.attempts), ("reason", place.reason),
                *((f"header {key}", value) for key, value in message.headers.items()),
                ("body", shown_body(message.body)),
            ])  # fmt: skip
    for one in missing:
        click.echo(f"lisa: {one} is not in the garbage of topic {topic}", err=True)
    if missing:
        raise click.exceptions.Exit(1)


def _now_ms() -> int:
    import time

    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class _Deed:
    verb: str
    action: Callable[[Store, str, str, Sequence[str]], Flow[list[bool]]]


def _ids_or_all(command: F) -> F:
    command = click.option("--all", "everything", is_flag=True, help="All that match.")(command)
    return click.argument("ids", metavar="[ID]...", nargs=-1)(command)


@garbage.command()
@click.argument("topic")
@_ids_or_all
@_filters
@common
@pass_chosen
def requeue(
    chosen: Chosen, topic: str, ids: tuple[str, ...], *, everything: bool, group: str | None,
    older_than: timedelta | None, reason: str | None,
) -> None:  # fmt: skip
    """Give dead messages a new life: due now, their failed attempts forgotten.

    Exit code 1 if one of the ids is not in the garbage.
    """
    from lisa.admin.garbage import requeue as action

    _check_choice(ids, everything=everything, filtered=bool(older_than or reason))
    store = chosen.store()
    selection = _selection(store, topic, group, older_than, reason)
    _do(chosen, store, selection, ids, _Deed("requeued", action))


@garbage.command()
@click.argument("topic")
@_ids_or_all
@_filters
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
@pass_chosen
def purge(
    chosen: Chosen, topic: str, ids: tuple[str, ...], *, everything: bool, group: str | None,
    older_than: timedelta | None, reason: str | None, yes: bool,
) -> None:  # fmt: skip
    """End dead messages for good. Exit code 1 if one of the ids is not in the garbage."""
    from lisa.admin.garbage import matching
    from lisa.admin.garbage import purge as action
    from lisa.cli.output import confirm

    _check_choice(ids, everything=everything, filtered=bool(older_than or reason))
    store = chosen.store()
    selection = _selection(store, topic, group, older_than, reason)
    count = len(ids) if ids else store.drive(matching(store, selection))
    if count:
        confirm(f"Purge {count} dead messages of {topic} for good?", yes=yes)
    _do(chosen, store, selection, ids, _Deed("purged", action))


def _check_choice(ids: tuple[str, ...], *, everything: bool, filtered: bool) -> None:
    if bool(ids) == everything:
        raise click.UsageError("give either ids or --all")
    if ids and filtered:
        raise click.UsageError("--older-than and --reason choose among --all; leave out the ids")


def _do(
    chosen: Chosen, store: SyncStore, selection: Selection, ids: tuple[str, ...], deed: _Deed
) -> None:
    from lisa.admin.garbage import act, groups_of
    from lisa.cli.output import console, print_json

    missing: list[str] = []
    if ids:
        hits = dict.fromkeys(ids, False)
        done = 0
        for group in store.drive(groups_of(store, selection)):
            asked = list(hits)
            answers = store.drive(deed.action(store, selection.topic, group, asked))
            done += sum(answers)
            for one, hit in zip(asked, answers, strict=True):
                hits[one] = hits[one] or hit
        missing = [one for one, hit in hits.items() if not hit]
    else:
        with console(err=True).status("") as status:
            done = store.drive(
                act(store, selection, deed.action,
                    progress=lambda n: status.update(f"{n} {deed.verb}"))
            )  # fmt: skip
    if chosen.json:
        print_json({"topic": selection.topic, deed.verb: done, "not_in_garbage": missing})
    else:
        click.echo(f"{selection.topic}  {done} {deed.verb}")
    for one in missing:
        click.echo(f"lisa: {one} is not in the garbage of topic {selection.topic}", err=True)
    if missing:
        raise click.exceptions.Exit(1)
