"""`lisa topic push`: where a topic's messages are POSTed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, Duration, common, pass_chosen

if TYPE_CHECKING:
    from lisa.admin.push import Placed, PushTarget

__all__ = ["push"]


@click.command()
@click.argument("topic")
@click.argument("url", required=False)
@click.option("--group", help="The group to push; the topic's only one unless set.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Pushes under way at a time, of each gateway process.",
)
@click.option("--timeout", type=Duration(), help="How long the target may take to answer.")
@click.option(
    "--secret-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the signing secret (whsec_...), instead of one that is made.",
)  # fmt: skip
@click.option("--new-secret", is_flag=True, help="Make a new signing secret.")
@click.option("--remove", is_flag=True, help="Push no more.")
@common
@pass_chosen
def push(
    chosen: Chosen, topic: str, url: str | None, *, group: str | None, concurrency: int | None,
    timeout: timedelta | None, secret_file: Path | None, new_secret: bool, remove: bool,
) -> None:  # fmt: skip
    """Have the gateways POST each message of a group to a URL; without URL show the targets.

    The signing secret is shown once, when it is made. Exit code 1 if there is no target.
    """
    settings = (concurrency, timeout, secret_file, new_secret or None)
    if url is None and any(one is not None for one in settings):
        raise click.UsageError("these options belong to a URL; give one")
    if remove and url is not None:
        raise click.UsageError("--remove takes no URL")
    if new_secret and secret_file is not None:
        raise click.UsageError("--new-secret and --secret-file contradict each other")
    if remove:
        _remove(chosen, topic, group)
        return
    if url is None:
        _show(chosen, topic, group)
        return
    from lisa.admin.push import place

    secret = None if secret_file is None else secret_file.read_text("utf-8").strip()
    store = chosen.store()
    placed = store.drive(
        place(
            store, topic, url, group=group, concurrency=concurrency, timeout=timeout,
            secret=secret, renew_secret=new_secret,
        )
    )  # fmt: skip
    _say(chosen, placed)


def _say(chosen: Chosen, placed: Placed) -> None:
    from lisa.cli.output import print_json

    target = placed.target
    if chosen.json:
        secret = {"secret": target.secret} if placed.is_new_secret else {}
        print_json({**_fields(target), "new": placed.is_new, **secret})
        return
    click.echo(f"{target.topic}  group {target.group} is pushed to {target.url}")
    if placed.is_new_secret:
        click.echo(f"secret, shown this once: {target.secret}")


def _fields(target: PushTarget) -> dict[str, Any]:
    return {
        "topic": target.topic, "group": target.group, "url": target.url,
        "concurrency": target.concurrency, "timeout_ms": target.timeout_ms,
    }  # fmt: skip


def _show(chosen: Chosen, topic: str, group: str | None) -> None:
    from lisa.admin.push import targets
    from lisa.cli.output import print_json, print_table
    from lisa.core.clock import human

    store = chosen.store()
    found = [one for one in store.drive(targets(store, topic)) if group in (None, one.group)]
    if chosen.json:
        print_json([_fields(one) for one in found])
    elif found:
        print_table(
            ["group", "url", "concurrency ", "timeout "],
            [(one.group, one.url, one.concurrency or "-",
              human(one.timeout_ms) if one.timeout_ms else "-") for one in found],
        )  # fmt: skip
    if not found:
        _none(topic, group)


def _remove(chosen: Chosen, topic: str, group: str | None) -> None:
    from lisa.admin.push import remove
    from lisa.cli.output import print_json

    store = chosen.store()
    gone = store.drive(remove(store, topic, group))
    if not gone:
        _none(topic, group)
    if chosen.json:
        print_json({"topic": topic, "removed": gone})
    else:
        click.echo(f"{topic}  pushed no more: {', '.join(gone)}")


def _none(topic: str, group: str | None) -> None:
    of = f"group {group} of topic {topic}" if group else f"topic {topic}"
    click.echo(f"lisa: {of} is not pushed anywhere", err=True)
    raise click.exceptions.Exit(1)
