"""`lisa next`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click

from lisa.cli.options import Chosen, calendar_options, check_zone, common, due_options
from lisa.cli.output import fail, iso, print_json


@click.command("next")
@click.argument("topic", required=False)
@due_options
@calendar_options
@click.option(
    "--header", "headers", multiple=True, metavar="KEY=VALUE", help="A header; may be repeated."
)
@click.option("--id", "message_id", metavar="ID", help="Explain this message of TOPIC instead.")
@common
def next_(
    chosen: Chosen,
    topic: str | None,
    *,
    headers: tuple[str, ...],
    message_id: str | None,
    **given: Any,
) -> None:
    """Show when a message would be due, and why; with TOPIC, in the topic's window.

    Nothing is sent. The options are those of `lisa send`.
    """
    from lisa.cli.send import parse_headers
    from lisa.core.model.windows.placing import clock_ms, explain

    if message_id is not None and topic is None:
        raise click.UsageError("--id needs TOPIC")
    window = _window_of(chosen, topic) if topic else ""
    now_ms = clock_ms()
    if message_id is not None:
        due, named = _found(chosen, topic or "", message_id, window, now_ms)
    else:
        due, named = _asked(chosen, given, parse_headers(headers), now_ms)
    steps = explain(due, named, window, now_ms)
    due_ms = _due_ms(due, named, window, now_ms)
    if chosen.json:
        print_json({"due_ms": due_ms, "due": iso(due_ms), "steps": steps})
        return
    for step in steps:
        click.echo(step)
    click.echo(f"due: {iso(due_ms)}")


def _window_of(chosen: Chosen, topic: str) -> str:
    store = chosen.store()
    return store.drive(store.options(topic)).window or ""


def _asked(
    chosen: Chosen, given: dict[str, Any], headers: dict[str, str], now_ms: int
) -> tuple[str, dict[str, str]]:
    """The due time that was asked for, and the headers that the message would have."""
    from lisa.core.model.clock import parse_zone
    from lisa.core.model.windows.placing import place
    from lisa.producer.plan import due_text

    delay: timedelta | None = given["delay"]
    at: datetime | None = given["at"]
    check_zone(chosen, at, given["tz"])
    named = given["tz"] or chosen.zone
    zone = None if named is None else parse_zone(named)
    due = due_text(delay, at, given["at_ms"], zone)
    placed = place({**given, "headers": headers}, due, zone, now_ms)
    return due or "+0", placed.headers


def _found(
    chosen: Chosen, topic: str, message_id: str, window: str, now_ms: int
) -> tuple[str, dict[str, str]]:
    """The due time and the headers of a stored message, without a wall time that was replaced."""
    from lisa.core.model.windows.placing import without_past_local
    from lisa.core.store.inspection import State

    found = chosen.producer().get(topic, message_id)
    # Garbage has the time of death instead, and a tombstone no headers.
    due_states = (State.WAITING, State.READY, State.IN_FLIGHT, State.RETRY)
    if found is None or found.due_ms is None or found.state not in due_states:
        fail(f"topic {topic}: message {message_id} is unknown, settled or in garbage")
    due_ms = found.due_ms
    return str(due_ms), without_past_local(found.headers or {}, due_ms, window, now_ms)


def _due_ms(due: str, headers: dict[str, str], window: str, now_ms: int) -> int:
    from lisa.core.model.windows.placing import due_again, moved, window_of

    local_ms = due_again(headers, window, now_ms)
    if local_ms is not None:
        return local_ms
    applies = window_of(headers, window)
    due = due if applies is None else moved(due, applies, now_ms)
    return now_ms + int(due[1:]) if due.startswith("+") else int(due)
