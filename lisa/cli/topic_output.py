"""What the commands on one topic share: its store, and the forms of their output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen
from lisa.cli.output import iso, print_json, print_table

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
            for name in ("sent", "acked", "retried", "cancelled", "expired")
        },
    }


def print_groups(counts: TopicState) -> None:
    """Print the messages of each group by state."""
    print_table(
        ["group", "ready ", "in flight ", "retry ", "garbage "],
        [(one.name, one.ready, one.in_flight, one.retry, one.garbage) for one in counts.groups],
    )


def store_with_topic(chosen: Chosen, topic: str) -> SyncStore:
    """The store; ends the command with exit code 1 if the topic is unknown."""
    from lisa.admin.topics import exists

    store = chosen.store()
    if not store.drive(exists(store, topic)):
        click.echo(f"lisa: topic {topic} is unknown", err=True)
        raise click.exceptions.Exit(1)
    return store


def print_result(chosen: Chosen, topic: str, said: str, *, changed: bool) -> None:
    """Print what a change did, or that it changed nothing."""
    if chosen.json:
        print_json({"topic": topic, "result": said, "changed": changed})
    else:
        click.echo(f"{topic}  {said}" + ("" if changed else " (unchanged)"))
