"""`lisa top`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from lisa import admin
from lisa.cli.options import Chosen, common
from lisa.cli.output import (
    console,
    distance,
    local,
    number,
    print_json,
    terminal_width,
    text_table,
)
from lisa.cli.topics import STATES, counts_fields, overdue_warning, require_topics
from lisa.core.model.errors import ServerUnavailable

if TYPE_CHECKING:
    from lisa.core.store.store import SyncStore

COLUMNS = [
    "topic",
    "waiting ",
    "ready ",
    "in flight ",
    "parked ",
    "retry ",
    "garbage ",
    "in/s ",
    "out/s ",
    "retried/s ",
    "p50 ms ",
    "p99 ms ",
    "next due",
    "at",
]
DROPPED = (
    *("at", "retried/s", "p50 ms", "retry", "parked", "next due"),
    *("in flight", "in/s", "p99 ms", "out/s", "garbage", "ready"),
)
"""The columns that a narrow terminal omits, in this order."""

MORE = "... and more topics; to watch some of them, name them: lisa top TOPIC..."


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option("--once", is_flag=True, help="Print one interval and exit.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@common
def top(chosen: Chosen, topics: tuple[str, ...], *, once: bool, interval: float) -> None:
    """Watch topics live: messages by state, messages in and out per second, lateness p50 and p99.

    Lateness is measured at first deliveries in the last interval. --json prints one line for each
    interval. Ctrl-C stops the command. Exit code 1 if a topic is unknown.
    """
    try:
        store = chosen.store()
        require_topics(store, topics)
        if once or chosen.json or not sys.stdout.isatty():
            _stream(chosen, store, topics, interval, once=once)
        else:
            _screen(store, topics, interval)
    except KeyboardInterrupt:
        return


def _stream(
    chosen: Chosen, store: SyncStore, topics: tuple[str, ...], interval: float, *, once: bool
) -> None:
    for before, after in _intervals(store, topics, interval):
        found = admin.live.activity(before, after)
        if chosen.json:
            fields = [_fields(after.topics[topic], one) for topic, one in found.items()]
            seconds = (after.at_us - before.at_us) / 1e6
            print_json({"at_ms": after.at_us // 1000, "seconds": seconds, "topics": fields})
            sys.stdout.flush()
        else:
            for line in _lines(store, found, after, terminal_width(), None):
                print(line)
            print(flush=True)
        if once:
            return


def _screen(store: SyncStore, topics: tuple[str, ...], interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(), screen=True, auto_refresh=False) as live:

        def show(text: str) -> None:
            live.update(Text(text), refresh=True)

        for before, after in _intervals(store, topics, interval, show):
            shown = _lines(store, admin.live.activity(before, after), after, *live.console.size)
            show("\n".join(shown))


def _intervals(
    store: SyncStore,
    topics: tuple[str, ...],
    interval: float,
    show: Callable[[str], None] | None = None,
) -> Iterator[tuple[admin.live.TopicsSnapshot, admin.live.TopicsSnapshot]]:
    """Two snapshots for each interval. With `show`, shows errors of an unavailable server."""
    before = store.drive(admin.live.look(store, topics))
    while True:
        time.sleep(interval)
        try:
            after = store.drive(admin.live.look(store, topics))
        except ServerUnavailable as error:
            if show is None:
                raise
            show(str(error))
        else:
            yield before, after
            before = after


def _fields(counts: admin.topics.TopicState, interval: admin.live.Interval) -> dict[str, Any]:
    return {
        **counts_fields(counts),
        "in_per_s": interval.per_s("sent"),
        "out_per_s": interval.per_s("acked"),
        "retried_per_s": interval.per_s("retried"),
        "garbage_per_s": interval.per_s("garbage"),
        "lateness_p50_ms": interval.lateness_ms(0.5),
        "lateness_p99_ms": interval.lateness_ms(0.99),
        "early": interval.early,
    }


def _lines(
    store: SyncStore,
    found: dict[str, admin.live.Interval],
    at: admin.live.TopicsSnapshot,
    width: int | None,
    height: int | None,
) -> Iterator[str]:
    """The table of one interval, and a warning if there is one.

    height: the lines of the screen; the table leaves out topics that do not fit.
    """
    rows = []
    now_ms = at.at_us // 1000
    for topic, interval in found.items():
        counts = at.topics[topic]
        rows.append(
            (
                counts.topic + (" (paused)" if counts.paused else ""),
                *(f"{getattr(counts, state):,}" for state in ("waiting", *STATES)),
                number(interval.per_s("sent")),
                number(interval.per_s("acked")),
                number(interval.per_s("retried")),
                number(interval.lateness_ms(0.5), 2),
                number(interval.lateness_ms(0.99), 2),
                distance(counts.next_due_ms, now_ms),
                local(counts.next_due_ms),
            )
        )
    said = overdue_warning(store, list(at.topics.values()), now_ms)
    below = text_table([""], [[said]], width) if said else ()
    table = list(text_table(COLUMNS, rows, width, DROPPED))
    notes = ["", *below] if said else []
    if height is not None and len(table) + len(notes) > height:
        notes = [MORE, *notes]
        del table[max(0, height - len(notes)) :]
    yield from table
    yield from notes
