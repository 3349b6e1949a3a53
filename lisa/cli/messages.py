"""`lisa get`, `cancel`, `reschedule` and `fire`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, check_zone, common, due_options, local_options
from lisa.cli.output import body_fields, iso, print_json, print_table, printable, when
from lisa.core.model.clock import duration_ms, human

if TYPE_CHECKING:
    from lisa.core.store.inspection import FoundInGroup, FoundMessage


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@common
def get(chosen: Chosen, topic: str, message_id: str) -> None:
    """Show the state of a message in every group. Exit code 1 if the id is unknown.

    Settled messages are shown until the topic's retention period ends.
    """
    found = chosen.producer().get(topic, message_id)
    if found is None:
        if chosen.json:
            print_json({"topic": topic, "id": message_id, "state": None})
        else:
            click.echo(f"lisa: {message_id} is unknown on topic {topic}", err=True)
        raise click.exceptions.Exit(1)
    if chosen.json:
        print_json(_document(found))
    else:
        _show(found, chosen.server_ms())


def _group_fields(in_group: FoundInGroup) -> dict[str, Any]:
    return {
        "state": str(in_group.state),
        "due": iso(in_group.due_ms),
        "due_ms": in_group.due_ms,
        "attempts": in_group.attempts,
        "deferrals": in_group.deferrals,
        "consumer": in_group.consumer,
        "idle_ms": None if in_group.idle is None else duration_ms(in_group.idle),
        "reason": in_group.reason,
        "traceback": in_group.traceback,
    }


def _document(found: FoundMessage) -> dict[str, Any]:
    return {
        "topic": found.topic,
        "id": found.id,
        **_group_fields(found),
        "headers": found.headers,
        **body_fields(found.body),
        "groups": {name: _group_fields(in_group) for name, in_group in found.groups.items()},
    }


def _show(found: FoundMessage, now_ms: int) -> None:
    idle = None if found.idle is None else human(duration_ms(found.idle))
    rows: list[tuple[str, object]] = [
        ("id", found.id),
        ("topic", found.topic),
        ("state", str(found.state)),
        ("due", when(found.due_ms, now_ms)),
        ("attempts", found.attempts),
    ]
    rows += [(f"header {name}", value) for name, value in found.headers.items()]
    for name, value in (
        ("consumer", found.consumer),
        ("idle", idle),
        ("deferrals", found.deferrals or None),
        ("reason", found.reason),
        ("traceback", found.traceback),
        ("body", shown_body(found.body)),
    ):
        if value is not None:
            rows.append((name, value))
    print_table(["", ""], rows)
    if len(found.groups) > 1:
        print_table(
            ["group", "state", "due", "attempts ", "reason"],
            [
                (name, str(one.state), when(one.due_ms, now_ms), one.attempts, one.reason)
                for name, one in found.groups.items()
            ],
        )


def shown_body(body: Any) -> str | None:
    """A body as readable text, cut after 2,000 characters."""
    import msgspec

    if body is None:
        return None
    text = body if isinstance(body, str) else None
    if text is None:
        text = repr(body) if isinstance(body, bytes) else msgspec.json.encode(body).decode()
    return text if len(text) <= 2_000 else f"{text[:2_000]} ... ({len(text)} characters)"


@click.command()
@click.argument("topic")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@common
def cancel(chosen: Chosen, topic: str, ids: tuple[str, ...]) -> None:
    """Cancel messages permanently. Exit code 1 unless all were cancelled.

    Prints each message's outcome: cancelled, or in_flight, done or unknown if it is unchanged.
    """
    outcomes = chosen.producer().cancel_many(topic, ids)
    _answer(chosen, topic, dict(zip(ids, map(str, outcomes), strict=True)), "cancelled")


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@due_options
@local_options
@common
def reschedule(chosen: Chosen, topic: str, message_id: str, **due: Any) -> None:
    """Change the due time of a message with --delay, --at, --at-ms or --at-local.

    Exit code 1 if the message can no longer be rescheduled.
    """
    if all(due[name] is None for name in ("delay", "at", "at_ms", "at_local")):
        raise click.UsageError("give one of --delay, --at, --at-ms and --at-local")
    producer = chosen.producer()
    check_zone(chosen, due["at"], due["tz"])
    outcome = producer.reschedule(topic, message_id, **due)
    _answer(chosen, topic, {message_id: str(outcome)}, "rescheduled")


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@common
def fire(chosen: Chosen, topic: str, message_id: str) -> None:
    """Make a message due now. Exit code 1 if the message can no longer be rescheduled."""
    outcome = chosen.producer().fire_now(topic, message_id)
    _answer(chosen, topic, {message_id: str(outcome)}, "rescheduled")


def _answer(chosen: Chosen, topic: str, outcomes: dict[str, str], good: str) -> None:
    if chosen.json:
        rows = [{"id": one, "outcome": outcome} for one, outcome in outcomes.items()]
        print_json({"topic": topic, "messages": rows})
    else:
        for one, outcome in outcomes.items():
            click.echo(f"{printable(one)}  {outcome}")
    if any(outcome != good for outcome in outcomes.values()):
        raise click.exceptions.Exit(1)
