"""`lisa topic journal`."""

from __future__ import annotations

import click

from lisa.cli.options import Chosen, common
from lisa.cli.output import fail, print_json, print_table, when
from lisa.cli.topic_output import print_result, store_with_topic


@click.group()
def journal() -> None:
    """Show a topic's journal, or forget an archive."""


@journal.command("show")
@click.argument("topic")
@common
def show_journal(chosen: Chosen, topic: str) -> None:
    """Show the journal's length and the progress of each archive."""
    from dataclasses import asdict

    from lisa.admin.journal import journal as flow

    store = store_with_topic(chosen, topic)
    found = store.drive(flow(store, topic))
    if chosen.json:
        print_json(asdict(found))
        return
    now_ms = store.drive(store.server_time_ms())
    print_table(
        ["", ""],
        [
            ("journal", "on" if found.on else "off"),
            ("events", found.events),
            ("oldest event", when(found.since_ms, now_ms) or "-"),
            ("written in total", found.written),
            ("lost before archiving", found.lost),
            ("failed writes", found.failed),
        ],
    )
    print_table(
        ["archive", "behind ", "last report"],
        [(one.name, one.behind, when(one.reported_ms, now_ms)) for one in found.archives],
    )


@journal.command("forget")
@click.argument("topic")
@click.argument("archive")
@common
def forget_archive(chosen: Chosen, topic: str, archive: str) -> None:
    """Stop keeping events for an archive that is no longer used."""
    from lisa.admin.journal import forget

    store = store_with_topic(chosen, topic)
    if not store.drive(forget(store, topic, archive)):
        fail(f"topic {topic} has no archive {archive}")
    print_result(chosen, topic, f"archive {archive} is forgotten", changed=True)
