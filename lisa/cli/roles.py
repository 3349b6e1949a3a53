"""`lisa consumers` and `lisa managers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, common
from lisa.cli.output import print_json, print_table
from lisa.cli.topic_output import require_topics
from lisa.core.model.clock import human

if TYPE_CHECKING:
    from lisa.admin.roles import RolePresence


@click.command()
@click.argument("topic", required=False)
@common
def consumers(chosen: Chosen, topic: str | None) -> None:
    """List the consumers of TOPIC or of all topics, including consumers that are gone.

    Exit code 1 if the topic is unknown.
    """
    from lisa.admin.roles import consumers as flow

    store = chosen.store()
    found = store.drive(flow(store, [topic] if topic else ()))
    if topic and not found:
        require_topics(store, [topic])
    if _as_json(chosen, found):
        return
    rows = []
    for seen in found:
        one = seen.record
        rows.append(
            (
                one.topic,
                one.group or "(no group yet)",
                one.name,
                one.condition if seen.alive else seen.state,
                f"{one.running}/{one.concurrency}",
                one.held,
                one.handled,
                f"{human(seen.silent_ms)} ago",
            )
        )
    columns = ["topic", "group", "consumer", "state", "running ", "held ", "handled ", "seen"]
    print_table(columns, rows, drop=["held", "handled", "seen", "running"])


@click.command()
@common
def managers(chosen: Chosen) -> None:
    """List the managers, including managers that are gone."""
    from lisa.admin.roles import managers as flow

    store = chosen.store()
    found = store.drive(flow(store))
    if _as_json(chosen, found):
        return
    print_table(
        ["manager", "state", "host", "pid ", "topics ", "seen"],
        [
            (
                seen.record.name,
                seen.state,
                seen.record.host,
                seen.record.pid,
                seen.record.topics,
                f"{human(seen.silent_ms)} ago",
            )
            for seen in found
        ],
        drop=["pid", "host", "topics"],
    )


def _as_json(chosen: Chosen, found: list[RolePresence[Any]]) -> bool:
    if not chosen.json:
        return False
    import msgspec

    print_json(
        [
            {
                **msgspec.structs.asdict(seen.record),
                "silent_ms": seen.silent_ms,
                "alive": seen.alive,
                "unknown": seen.is_unknown,
            }
            for seen in found
        ]
    )
    return True
