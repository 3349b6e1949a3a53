"""`lisa schedules`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lisa import admin
from lisa.cli.messages import shown_body
from lisa.cli.options import Chosen, common, duration, moment, together
from lisa.cli.output import body_fields, confirm, fail, iso, print_json, print_table, when
from lisa.cli.send import kind_options, parse_body, parse_headers
from lisa.cli.topics import require_topics
from lisa.core.model.clock import datetime_ms, parse_zone
from lisa.core.model.keys import shown_id
from lisa.core.model.lanes import MAX_COST
from lisa.core.model.late import late_text
from lisa.core.model.recurring.definition import body_of

if TYPE_CHECKING:
    from lisa.producer import Producer, ScheduleInfo


@click.group()
def schedules() -> None:
    """List, define or run recurring messages."""


_topic_and_name = together(click.argument("topic"), click.argument("name"))


@schedules.command("list")
@click.argument("topic", required=False)
@common
def list_(chosen: Chosen, topic: str | None) -> None:
    """List the schedules of TOPIC, or of all topics, with their next ticks.

    Exit code 1 if the topic is unknown.
    """
    from lisa.core.store.schedules import list_all, scheduled_topics

    store = chosen.store()
    topics = [topic] if topic else sorted(store.drive(scheduled_topics(store)))
    found = [schedule for name in topics for schedule in store.drive(list_all(store, name))]
    if topic and not found:
        require_topics(store, [topic])
    if chosen.json:
        schedules = [_fields(schedule) for schedule in found]
        print_json({"topic": topic, "schedules": schedules} if topic else {"schedules": schedules})
        return
    now_ms = chosen.server_ms()
    rows = (
        [
            *([] if topic else [schedule.topic]),
            schedule.name,
            schedule.definition.rule,
            schedule.definition.tz,
            _next(schedule, now_ms),
            schedule.made,
            schedule.version,
        ]
        for schedule in found
    )
    print_table(
        [*([] if topic else ["topic"]), "name", "rule", "tz", "next", "created ", "version "],
        rows,
        drop=["version", "tz"],
    )
    late = store.drive(admin.schedules.late(store, topics, now_ms)).values()
    late_ms = max((now_ms - ticks.since_ms for ticks in late), default=0)
    if late and (said := store.drive(admin.roles.late_warning(store, late_ms, "schedules"))):
        click.echo(f"lisa: {said}", err=True)


@schedules.command()
@_topic_and_name
@common
def show(chosen: Chosen, topic: str, name: str) -> None:
    """Show one schedule. Exit code 1 if there is none."""
    _, found = _found(chosen, topic, name)
    if chosen.json:
        print_json(_fields(found))
        return

    fields = _fields(found) | {"body": shown_body(body_of(found.definition))}
    shown = {key: _text(value) for key, value in fields.items() if value not in (None, {}, "")}
    print_table(["field", "value"], shown.items())


@schedules.command("set")
@_topic_and_name
@click.argument("body", required=False)
@click.option("--cron", metavar="PATTERN", help="Cron pattern: '0 9 * * 1-5', @daily.")
@click.option("--every", type=duration, metavar="DURATION", help="Interval, at least 1s.")
@click.option("--tz", metavar="ZONE", help="Time zone: Europe/Berlin, +01:00. Default: UTC.")
@click.option(
    "--dst",
    type=click.Choice(["vixie", "skip"]),
    default="vixie",
    show_default=True,
    help="A time that a change of the clock skips fires right after it, or not at all.",
)
@click.option("--start", type=moment, metavar="ISO", help="No tick before this time.")
@click.option("--until", type=moment, metavar="ISO", help="No tick after this time.")
@click.option("--count", type=click.IntRange(1), help="Maximum number of occurrences.")
@click.option("--jitter", type=duration, metavar="DURATION", help="Each is later by up to this.")
@click.option(
    "--catch-up",
    default="one",
    show_default=True,
    metavar="POLICY",
    help="Ticks missed while no manager ran: none, one, all or 'all(max=20)'.",
)
@click.option("--max-late", type=duration, metavar="DURATION", help="Catch up nothing later.")
@click.option(
    "--overlap",
    type=click.Choice(["allow", "skip", "queue_one", "replace_unstarted"]),
    default="allow",
    show_default=True,
    help="A tick while an earlier occurrence is unfinished.",
)
@click.option("--template", is_flag=True, help="Fill ${tick}, ${previous}, ${count} into BODY.")
@click.option("--ttl", type=duration, metavar="DURATION", help="Of each occurrence.")
@click.option("--retry", metavar="DELAYS", help="Retry delays: 0,0,2m,10m; '' for no retries.")
@click.option("--late", metavar="POLICY", help="'collapse after 10m', or skip, garbage or run.")
@click.option("--key", metavar="KEY", help="Of each occurrence.")
@click.option("--cost", type=click.IntRange(1, MAX_COST), help="Of each occurrence. Default: 1.")
@click.option("--slack", type=duration, metavar="DURATION", help="Each may start this much later.")
@click.option("--header", "headers", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
@kind_options
@click.option("--if-version", type=click.IntRange(0), help="Only change this version; 0: create.")
@common
def set_(
    chosen: Chosen,
    topic: str,
    name: str,
    body: str | None,
    *,
    headers: tuple[str, ...],
    kind: str | None,
    **options: Any,
) -> None:
    """Create or change a schedule of TOPIC, which sends BODY at each tick (default: null).

    The same definition changes nothing. Exit code 1 if the schedule has another version.
    """
    data = b"null" if body is None else body.encode("utf-8", "surrogateescape")
    changed = chosen.producer().schedule(
        name, topic=topic, body=parse_body(data, kind), headers=parse_headers(headers), **options
    )
    _report(chosen, topic, name, done="set", changed=changed, other="unchanged")


@schedules.command()
@_topic_and_name
@common
def pause(chosen: Chosen, topic: str, name: str) -> None:
    """Stop a schedule and remove its pending occurrence. Exit code 1 if the schedule is unknown."""
    producer, _ = _found(chosen, topic, name)
    changed = producer.pause_schedule(topic, name)
    _report(chosen, topic, name, done="paused", changed=changed, other="paused already")


@schedules.command()
@_topic_and_name
@common
def resume(chosen: Chosen, topic: str, name: str) -> None:
    """Resume with the next tick; ticks during the pause are not caught up.

    Exit code 1 if the schedule is unknown.
    """
    producer, _ = _found(chosen, topic, name)
    changed = producer.resume_schedule(topic, name)
    _report(chosen, topic, name, done="resumed", changed=changed, other="not paused")


@schedules.command("run-now")
@_topic_and_name
@common
def run_now(chosen: Chosen, topic: str, name: str) -> None:
    """Create an occurrence that is due now, besides the ticks. Prints its message id.

    Exit code 1 if the schedule is unknown.
    """
    producer, _ = _found(chosen, topic, name)
    made = producer.run_schedule(topic, name)
    chosen.answer({"topic": topic, "name": name, "id": made}, shown_id(made))


@schedules.command()
@_topic_and_name
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
def remove(chosen: Chosen, topic: str, name: str, *, yes: bool) -> None:
    """Remove a schedule and its pending occurrence. Exit code 1 if there is none."""
    confirm(f"Remove schedule {name} of topic {topic}?", yes=yes or chosen.json)
    if not chosen.producer().remove_schedule(topic, name):
        _fail(topic, name)
    _report(chosen, topic, name, done="removed", changed=True, other="")


@schedules.command("next")
@_topic_and_name
@click.option("--count", type=click.IntRange(1, 10_000), default=5, show_default=True)
@common
def next_(chosen: Chosen, topic: str, name: str, *, count: int) -> None:
    """Show the next ticks of a schedule, in local time and in its zone.

    Exit code 1 if the schedule is unknown.
    """
    producer, found = _found(chosen, topic, name)
    ticks = producer.next_ticks(topic, name, count)
    zone = parse_zone(found.definition.tz)
    if chosen.json:
        print_json({"topic": topic, "name": name, "ticks": [iso(datetime_ms(t)) for t in ticks]})
        return
    now_ms = chosen.server_ms()
    rows = (
        [when(datetime_ms(tick), now_ms), tick.astimezone(zone).isoformat(sep=" ")]
        for tick in ticks
    )
    print_table(["local time", f"in {found.definition.tz}"], rows)


@schedules.command()
@_topic_and_name
@click.option("--from", "start", type=moment, required=True, metavar="ISO", help="First tick.")
@click.option("--to", "end", type=moment, required=True, metavar="ISO", help="Last tick.")
@common
def backfill(chosen: Chosen, topic: str, name: str, *, start: datetime, end: datetime) -> None:
    """Create the occurrences of past ticks, due at once. Known ones are not repeated.

    A time without an offset is in the local time zone. Exit code 1 if the schedule is unknown.
    """
    producer, _ = _found(chosen, topic, name)
    created, known = producer.backfill_schedule(topic, name, start.astimezone(), end.astimezone())
    document = {"topic": topic, "name": name, "created": created, "known": known}
    chosen.answer(document, f"{topic}  {name}  {created} created, {known} known already")


def _found(chosen: Chosen, topic: str, name: str) -> tuple[Producer, ScheduleInfo]:
    """A producer, and the schedule; ends the command with exit code 1 if there is none."""
    producer = chosen.producer()
    found = producer.get_schedule(topic, name)
    if found is None:
        _fail(topic, name)
    return producer, found


def _fail(topic: str, name: str) -> NoReturn:
    fail(f"topic {topic} has no schedule {name}")


def _report(chosen: Chosen, topic: str, name: str, *, done: str, changed: bool, other: str) -> None:
    document = {"topic": topic, "name": name, "changed": changed}
    chosen.answer(document, f"{topic}  {name}  {done if changed else other}")


def _next(one: ScheduleInfo, now_ms: int) -> str:
    return "paused" if one.is_paused else when(one.next_ms, now_ms) or "none left"


def _text(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shown_body(value) if isinstance(value, dict) else value


def _fields(one: ScheduleInfo) -> dict[str, Any]:
    """A schedule for JSON output."""
    definition = one.definition
    times = {"every_ms", "jitter_ms", "max_late_ms", "slack_ms", "ttl_ms"}
    plain = {name: getattr(definition, name) or None for name in sorted(times)}
    return {
        "topic": one.topic,
        "name": one.name,
        "version": one.version,
        "paused": one.is_paused,
        "next": iso(one.next_ms),
        "last": iso(one.last_ms),
        "created": one.made,
        "cron": definition.cron or None,
        "tz": definition.tz,
        "dst": str(definition.dst),
        "start": iso(definition.start_ms),
        "until": iso(definition.until_ms),
        "count": definition.most,
        "catch_up": str(definition.catch_up),
        "max_caught_up": definition.max_caught_up,
        "overlap": str(definition.overlap),
        "template": definition.template,
        "headers": definition.headers,
        "retry": definition.policy,
        "late": late_text(definition.late),
        "key": definition.key,
        "cost": definition.cost,
        **plain,
        **body_fields(body_of(definition)),
    }
