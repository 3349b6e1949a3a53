"""`lisa topic push`: the URLs to which the gateways push a topic's messages."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lisa.cli.options import Chosen, Duration, common, read_text_file
from lisa.cli.output import fail, print_json, print_table
from lisa.cli.topic_output import telling_new_topic
from lisa.core.model.clock import human

if TYPE_CHECKING:
    from lisa.admin.push import SetTarget, StoredPushTarget


@click.command()
@click.argument("topic")
@click.argument("url", required=False)
@click.option("--group", help="Group to push. Default: the topic's only group.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Maximum concurrent pushes of each gateway process.",
)
@click.option("--timeout", type=Duration(), help="Maximum time for the target to answer.")
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the signing secret (whsec_...). Default: a generated secret.",
)
@click.option("--new-secret", is_flag=True, help="Generate a new signing secret.")
@click.option("--remove", is_flag=True, help="Stop pushing.")
@common
def push(
    chosen: Chosen,
    topic: str,
    url: str | None,
    *,
    group: str | None,
    concurrency: int | None,
    timeout: timedelta | None,
    secret_file: Path | None,
    new_secret: bool,
    remove: bool,
) -> None:
    """Make the gateways POST each message of a group to URL. Without URL, list the push targets.

    The signing secret is printed once, when it is generated. Exit code 1 if there is no target.
    """
    settings = (concurrency, timeout, secret_file, new_secret or None)
    if url is None and any(one is not None for one in settings):
        raise click.UsageError("these options need a URL")
    if remove and url is not None:
        raise click.UsageError("--remove takes no URL")
    if new_secret and secret_file is not None:
        raise click.UsageError("--new-secret and --secret-file exclude each other")
    if remove:
        _remove(chosen, topic, group)
        return
    if url is None:
        _show(chosen, topic, group)
        return
    from lisa.admin.push import set_target

    secret = None if secret_file is None else read_text_file(secret_file).strip()
    store = chosen.store()
    with telling_new_topic(store, topic):
        done = store.drive(
            set_target(
                store,
                topic,
                url,
                group=group,
                concurrency=concurrency,
                timeout=timeout,
                secret=secret,
                renew_secret=new_secret,
            )
        )
        _print_target(chosen, done)


def _print_target(chosen: Chosen, done: SetTarget) -> None:
    target = done.target
    if chosen.json:
        secret = {"secret": target.secret} if done.is_new_secret else {}
        print_json({**_fields(target), "new": done.is_new, **secret})
        return
    click.echo(f"{target.topic}  group {target.group} is pushed to {target.url}")
    if done.is_new_secret:
        click.echo(f"secret (shown only once): {target.secret}")


def _fields(target: StoredPushTarget) -> dict[str, Any]:
    return {
        "topic": target.topic,
        "group": target.group,
        "url": target.url,
        "concurrency": target.concurrency,
        "timeout_ms": target.timeout_ms,
    }


def _show(chosen: Chosen, topic: str, group: str | None) -> None:
    from lisa.admin.push import targets

    store = chosen.store()
    found = [one for one in store.drive(targets(store, topic)) if group in (None, one.group)]
    if chosen.json:
        print_json([_fields(one) for one in found])
    elif found:
        print_table(
            ["group", "url", "concurrency ", "timeout "],
            [
                (
                    one.group,
                    one.url,
                    one.concurrency or "-",
                    human(one.timeout_ms) if one.timeout_ms else "-",
                )
                for one in found
            ],
        )
    if not found:
        _fail_without_target(topic, group)


def _remove(chosen: Chosen, topic: str, group: str | None) -> None:
    from lisa.admin.push import remove

    store = chosen.store()
    gone = store.drive(remove(store, topic, group))
    if not gone:
        _fail_without_target(topic, group)
    if chosen.json:
        print_json({"topic": topic, "removed": gone})
    else:
        click.echo(f"{topic}  no longer pushed: {', '.join(gone)}")


def _fail_without_target(topic: str, group: str | None) -> NoReturn:
    of = f"group {group} of topic {topic}" if group else f"topic {topic}"
    fail(f"{of} has no push target")
