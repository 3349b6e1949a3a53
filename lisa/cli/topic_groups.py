"""`lisa topic group`."""

from __future__ import annotations

import click

from lisa.cli.options import Chosen, common
from lisa.cli.output import confirm, counting, fail, print_json
from lisa.cli.topic_output import (
    counts_fields,
    print_groups,
    print_result,
    store_with_topic,
    telling_new_topic,
)


@click.group()
def group() -> None:
    """Add, remove or list a topic's groups."""


@group.command()
@click.argument("topic")
@click.argument("group")
@common
def add(chosen: Chosen, topic: str, group: str) -> None:
    """Declare a group. It receives every message that is promoted from now on."""
    from lisa.admin.groups import add as flow

    store = chosen.store()
    with telling_new_topic(store, topic):
        new = store.drive(flow(store, topic, group))
        print_result(chosen, topic, f"group {group} is declared", changed=new)


@group.command()
@click.argument("topic")
@click.argument("group")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common
def remove(chosen: Chosen, topic: str, group: str, *, yes: bool) -> None:
    """Remove a group and purge its messages; other groups keep theirs.

    The group's consumers stop reading the topic. Repeat the command to finish an interrupted
    removal.
    """
    from lisa.admin import groups

    store = store_with_topic(chosen, topic)
    owed = store.drive(groups.unsettled_in_all(store, topic, group))
    if owed:
        confirm(
            f"Group {group} of {topic} still has {owed} unsettled messages. Remove it?", yes=yes
        )
    with counting("purged") as progress:
        settled = store.drive(groups.remove(store, topic, group, progress=progress))
    if settled is None:
        fail(f"topic {topic} has no group {group}")
    print_result(
        chosen, topic, f"group {group} is removed, {settled} messages purged", changed=True
    )


@group.command("list")
@click.argument("topic")
@common
def list_groups(chosen: Chosen, topic: str) -> None:
    """List the topic's groups."""
    from lisa.admin.topics import counts

    store = store_with_topic(chosen, topic)
    found = store.drive(counts(store, [topic]))[0]
    if chosen.json:
        print_json(counts_fields(found)["groups"])
        return
    print_groups(found)
