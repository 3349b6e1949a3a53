"""`lisa top`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, common, pass_chosen

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from lisa.admin.live import Activity, Look
    from lisa.core.store import SyncStore

__all__ = ["top"]

COLUMNS = [
    "topic", "waiting ", "ready ", "in flight ", "retry ", "garbage ", "in/s ", "out/s ",
    "retried/s ", "p50 ms ", "p99 ms ", "next due",
]  # fmt: skip


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option("--once", is_flag=True, help="One look over one interval, then end.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@common
@pass_chosen
def top(chosen: Chosen, topics: tuple[str, ...], *, once: bool, interval: float) -> None:
    """Watch topics live: each state, messages in and out per second, lateness p50 and p99.

    Lateness is that of first hand-overs within the last interval. With --json each look is one
    line. Ctrl-C ends it.
    """
    store = chosen.store()
    try:
        if once or chosen.json or not sys.stdout.isatty():
            _lines(chosen, store, topics, interval, once=once)
        else:
            _screen(store, topics, interval)
    except KeyboardInterrupt:
        return


def _lines(
    chosen: Chosen, store: SyncStore, topics: tuple[str, ...], interval: float, *, once: bool
) -> None:
    from lisa.admin.live import look

    before = store.drive(look(store, topics))
    while True:
        time.sleep(interval)
        after = store.drive(look(store, topics))
        _print(chosen, before, after)
        if once:
            return
        before = after


def _screen(store: SyncStore, topics: tuple[str, ...], interval: float) -> None:
    from rich.live import Live

    from lisa.admin.live import activity, look
    from lisa.cli.output import console

    before = store.drive(look(store, topics))
    with Live(_table([], before), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            after = _next(store, topics, live)
            live.update(_table(activity(before, after), after), refresh=True)
            before = after


def _next(store: SyncStore, topics: tuple[str, ...], live: Live) -> Look:
    """The next look; while the server is away the screen says so and goes on trying."""
    from rich.text import Text

    from lisa.admin.live import look
    from lisa.core.errors import ServerUnavailable

    while True:
        try:
            return store.drive(look(store, topics))
        except ServerUnavailable as error:
            live.update(Text(str(error)), refresh=True)


def _print(chosen: Chosen, before: Look, after: Look) -> None:
    from lisa.admin.live import activity
    from lisa.cli.output import console, print_json

    found = activity(before, after)
    if chosen.json:
        print_json({
            "at_ms": after.at_us // 1000, "seconds": (after.at_us - before.at_us) / 1e6,
            "topics": [_fields(one) for one in found],
        })  # fmt: skip
        sys.stdout.flush()
    else:
        console().print(_table(found, after))


def _fields(one: Activity) -> dict[str, Any]:
    from lisa.cli.topics import counts_fields

    return {
        **counts_fields(one.counts), "in_per_s": one.in_per_s, "out_per_s": one.out_per_s,
        "retried_per_s": one.retried_per_s, "garbage_per_s": one.garbage_per_s,
        "lateness_p50_ms": one.p50_ms, "lateness_p99_ms": one.p99_ms, "early": one.early,
    }  # fmt: skip


def _table(found: list[Activity], at: Look) -> Table:
    from lisa.cli.output import number, table, when

    rows = []
    for one in found:
        counts = one.counts
        states = (
            sum(getattr(group, state) for group in counts.groups)
            for state in ("ready", "in_flight", "retry", "garbage")
        )
        rows.append((
            counts.topic + (" (paused)" if counts.paused else ""), f"{counts.waiting:,}",
            *(f"{n:,}" for n in states), number(one.in_per_s), number(one.out_per_s),
            number(one.retried_per_s), number(one.p50_ms, 2), number(one.p99_ms, 2),
            when(counts.next_due_ms, at.at_us // 1000),
        ))  # fmt: skip
    return table(COLUMNS, rows)
