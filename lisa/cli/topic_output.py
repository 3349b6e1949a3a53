"""What the commands on one topic share: its store, and the forms of their output."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen
from lisa.cli.output import fail, iso, print_json, print_table, terminal_width

if TYPE_CHECKING:
    from lisa.admin.topics import TopicState
    from lisa.core.store.store import SyncStore

STATES = ("ready", "in_flight", "retry", "garbage")
"""The states in which a group has messages."""


def counts_fields(counts: TopicState) -> dict[str, Any]:
    """A topic's counts for JSON output."""
    return {
        "topic": counts.topic,
        "paused": counts.paused,
        "waiting": counts.waiting,
        **{state: getattr(counts, state) for state in STATES},
        "next_due": iso(counts.next_due_ms),
        "next_due_ms": counts.next_due_ms,
        "groups": [
            {
                "group": group.name,
                **{state: getattr(group, state) for state in STATES},
                "intact": group.intact,
            }
            for group in counts.groups
        ],
        **{
            name: counts.total(name)
            for name in ("sent", "acked", "retried", "cancelled", "expired", "skipped")
        },
    }


def overdue_warning(store: SyncStore, states: Sequence[TopicState], now_ms: int) -> str | None:
    """Why messages wait: the server refuses writes, or no manager runs; None if all is well."""
    from lisa.admin.topics import overdue_ms

    return late_warning(store, overdue_ms(states, now_ms))


def late_warning(store: SyncStore, late_ms: int, what: str = "messages") -> str | None:
    """The same for messages or schedules that are late by that much."""
    from lisa.admin.roles import managers
    from lisa.core.model.clock import duration_ms
    from lisa.core.store.presence import OVERDUE, warning, write_refusal

    refusal = store.drive(write_refusal(store, store.keys.managers))
    if refusal is not None:
        return f"{store.where} {refusal.cause} and refuses writes: {refusal.cure}"
    if late_ms < duration_ms(OVERDUE) or any(one.alive for one in store.drive(managers(store))):
        return None
    return warning(late_ms, what)


def print_groups(counts: TopicState) -> None:
    """Print the messages of each group by state."""
    print_table(
        ["group", "ready ", "in flight ", "retry ", "garbage "],
        [(one.name, one.ready, one.in_flight, one.retry, one.garbage) for one in counts.groups],
    )


def store_with_topic(chosen: Chosen, topic: str) -> SyncStore:
    """The store; ends the command with exit code 1 if the topic is unknown."""
    store = chosen.store()
    require_topics(store, [topic])
    return store


def require_topics(store: SyncStore, topics: Sequence[str], cure: str = "") -> None:
    """End the command with exit code 1 if one of the topics is unknown; names a similar one."""
    import difflib

    from lisa.admin.topics import exists

    for topic in topics:
        if not store.drive(exists(store, topic)):
            near = difflib.get_close_matches(topic, store.drive(store.topics()), n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            fail(f"topic {topic} is unknown{hint}{cure}")


@contextmanager
def telling_new_topic(store: SyncStore, topic: str) -> Iterator[None]:
    """Say on stderr that the command created the topic: its name may be mistyped."""
    from lisa.admin.topics import exists

    was_known = store.drive(exists(store, topic))
    yield
    if not was_known:
        click.echo(f"lisa: topic {topic} is new", err=True)


def print_suspected_names(store: SyncStore, states: Sequence[TopicState]) -> None:
    """Print to stderr which topics may be mistyped."""
    from lisa.admin.topic_names import suspected_names

    for line in store.drive(suspected_names(store, states)):
        width = terminal_width() or sys.maxsize
        click.echo(textwrap.fill(f"lisa: {line}", width, break_long_words=False), err=True)


def print_result(chosen: Chosen, topic: str, said: str, *, changed: bool) -> None:
    """Print what a change did, or that it changed nothing."""
    if chosen.json:
        print_json({"topic": topic, "result": said, "changed": changed})
    else:
        click.echo(f"{topic}  {said}" + ("" if changed else " (unchanged)"))
