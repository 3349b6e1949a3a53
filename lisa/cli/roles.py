"""`lisa consumers` and `lisa managers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, common, pass_chosen

if TYPE_CHECKING:
    from lisa.admin.roles import Seen

__all__ = ["consumers", "managers"]


@click.command()
@click.argument("topic", required=False)
@common
@pass_chosen
def consumers(chosen: Chosen, topic: str | None) -> None:
    """Show the consumers of TOPIC, or of all topics: what they hold, and which are gone."""
    from lisa.admin.roles import consumers as flow
    from lisa.cli.output import print_table
    from lisa.core.clock import human

    store = chosen.store()
    found = store.drive(flow(store, [topic] if topic else ()))
    if _as_json(chosen, found):
        return
    rows = []
    for seen in found:
        one: Any = seen.record
        rows.append((
            one.topic, one.group or "(waits for one)", one.name,
            one.state if seen.alive else "gone", f"{one.running}/{one.concurrency}", one.held,
            one.handled, f"{human(seen.silent_ms)} ago",
        ))  # fmt: skip
    columns = ["topic", "group", "consumer", "state", "running ", "held ", "handled ", "seen"]
    print_table(columns, rows)


@click.command()
@common
@pass_chosen
def managers(chosen: Chosen) -> None:
    """Show the managers, and which are gone."""
    from lisa.admin.roles import managers as flow
    from lisa.cli.output import print_table
    from lisa.core.clock import human

    store = chosen.store()
    found = store.drive(flow(store))
    if _as_json(chosen, found):
        return
    print_table(
        ["manager", "state", "host", "pid ", "topics ", "seen"],
        [(seen.record.name, "alive" if seen.alive else "gone", seen.record.host, seen.record.pid,
          getattr(seen.record, "topics", ""), f"{human(seen.silent_ms)} ago") for seen in found],
    )  # fmt: skip


def _as_json(chosen: Chosen, found: list[Seen]) -> bool:
    if not chosen.json:
        return False
    import msgspec

    from lisa.cli.output import print_json

    print_json([
        {**msgspec.structs.asdict(seen.record), "silent_ms": seen.silent_ms, "alive": seen.alive}
        for seen in found
    ])  # fmt: skip
    return True
