"""`lisa send` and `lisa next`."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec

from lisa.cli.options import (
    Chosen,
    calendar_options,
    check_zone,
    common,
    due_options,
    duration,
    key_option,
    together,
    whole_id,
)
from lisa.cli.output import fail, iso, print_json, print_table, progress_bar
from lisa.core.model.clock import parse_zone
from lisa.core.model.envelope import without_repeats
from lisa.core.model.errors import InvalidMessage, LisaError
from lisa.core.model.keys import shown_id
from lisa.core.model.lanes import MAX_COST
from lisa.core.model.sharding import KEY_END
from lisa.core.model.windows.placing import (
    clock_ms,
    due_again,
    explain,
    moved,
    place,
    window_of,
    without_past_local,
)
from lisa.core.store.inspection import State
from lisa.core.transitions.enqueue import OnDuplicate, Sent

if TYPE_CHECKING:
    from lisa.producer import Producer

header_option = click.option(
    "--header", "headers", multiple=True, metavar="KEY=VALUE", help="A header; may be repeated."
)
kind_options = together(
    click.option("--json-body", "kind", flag_value="json", help="BODY must be JSON."),
    click.option(
        "--text", "kind", flag_value="text", help="BODY is text even if it looks like JSON."
    ),
)


coalescing_options = together(
    click.option(
        "--debounce",
        type=duration,
        metavar="DURATION",
        help="Of the sends of KEY, only the last, once there was none for this long.",
    ),
    click.option(
        "--max-wait",
        type=duration,
        metavar="DURATION",
        help="With --debounce: the longest time from the first of these sends.",
    ),
    click.option(
        "--throttle",
        type=duration,
        metavar="DURATION",
        help="Of the sends of KEY, one at once, then the last each time this has passed.",
    ),
    click.option(
        "--latest",
        is_flag=True,
        default=None,
        help="Takes the place of the last message of KEY, unless that has started.",
    ),
)


@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@due_options
@calendar_options
@click.option("--id", "message_id", metavar="ID", help="The message's id. Default: generated.")
@click.option(
    "--key", metavar="KEY", help="What the message concerns; ids are unique in their key."
)
@click.option(
    "--ttl", type=duration, metavar="DURATION", help="Expires this long after the due time."
)
@click.option("--retry", metavar="DELAYS", help="Retry delays: 0,0,2m,10m; '' for no retries.")
@click.option("--late", metavar="POLICY", help="If it is late: 'skip after 10m', garbage or run.")
@click.option(
    "--cost", type=click.IntRange(1, MAX_COST), help="Counts as this many messages for rates."
)
@click.option(
    "--slack",
    type=duration,
    metavar="DURATION",
    help="How much later than due it may start without harm.",
)
@header_option
@coalescing_options
@click.option(
    "--on-duplicate",
    type=click.Choice([mode.value for mode in OnDuplicate]),
    help="What to do if the id is already known.  [default: keep]",
)
@kind_options
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Send each line of this file as a message, except empty lines. - reads stdin.",
)
@common
def send(
    chosen: Chosen,
    topic: str,
    body: str | None,
    *,
    message_id: str | None,
    headers: tuple[str, ...],
    kind: str | None,
    file: Path | None,
    **options: Any,
) -> None:
    """Send BODY to TOPIC, due now unless an option gives its due time. Prints the message's id.

    With --key, the id is what follows the key.

    BODY is sent as JSON if it parses as JSON (42 is a number), otherwise as text; --json-body and
    --text override this. BODY - reads stdin.
    """
    if (body is None) == (file is None):
        raise click.UsageError("give either BODY or --file")
    if file is not None and message_id is not None:
        raise click.UsageError("--id cannot be combined with --file")
    producer = chosen.producer()
    check_zone(chosen, options["at"], options["tz"])
    options["headers"] = parse_headers(headers)
    if file is not None:
        _send_file(chosen, producer, topic, file, kind=kind, options=options)
        return
    given = (body or "").encode("utf-8", "surrogateescape")
    data = sys.stdin.buffer.read() if body == "-" else given
    sent, outcome = producer.send_one(topic, parse_body(data, kind), id=message_id, **options)
    if chosen.json:
        key = options["key"]
        print_json({"topic": topic, "id": sent, "key": key, "outcome": outcome})
    elif outcome != Sent.REJECTED:
        click.echo(sent.rpartition(KEY_END)[2])
    if outcome in (Sent.DUPLICATE, Sent.REJECTED):
        _tell_duplicate(producer, topic, sent)
    if outcome == Sent.REJECTED:
        raise click.exceptions.Exit(1)


def _tell_duplicate(producer: Producer, topic: str, message_id: str) -> None:
    """Say that nothing was sent, and which message has the id."""
    found = producer.get(topic, message_id)
    state = f" ({str(found.state).replace('_', ' ')})" if found is not None else ""
    said = f"nothing was sent: id {shown_id(message_id)} is already known on topic {topic}{state}"
    click.echo(f"lisa: {said}", err=True)


def parse_headers(pairs: Iterable[str]) -> dict[str, str]:
    """Headers from KEY=VALUE texts. Raises UsageError."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--header {pair!r} is not KEY=VALUE")
        if name in found:
            raise click.UsageError(f"--header {name} is given twice; remove one")
        found[name] = value
    return found


def parse_body(data: bytes, kind: str | None) -> Any:
    """Decode JSON, or else text; bytes that are neither stay bytes.

    Raises InvalidMessage if a key of JSON occurs twice.
    """
    if kind != "text":
        try:
            body = msgspec.json.decode(data)
            if b"{" in data:
                with suppress(RecursionError):
                    json.loads(data, object_pairs_hook=without_repeats, parse_int=str)
            return body
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if kind == "json":
                raise InvalidMessage(f"the body is not JSON: {error}") from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _send_file(
    chosen: Chosen,
    producer: Producer,
    topic: str,
    path: Path,
    *,
    kind: str | None,
    options: dict[str, Any],
) -> None:
    with click.open_file(str(path), "rb") as lines:
        total = None if str(path) == "-" else path.stat().st_size
        with progress_bar("{task.fields[sent]} sent") as bar:
            task = bar.add_task("", total=total, sent=0)
            empty: list[int] = []

            def bodies(source: IO[bytes]) -> Iterator[Any]:
                done = 0
                for number, line in enumerate(source, 1):
                    done += len(line)
                    text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    if text.strip():
                        yield _parse_line(text, number, kind)
                    else:
                        empty.append(number)
                    if number % 500 == 0:
                        bar.update(task, completed=done, sent=number - len(empty))

            counts = _send_lines(producer, topic, bodies(lines), empty, options)
    if chosen.json:
        print_json({"topic": topic, **counts})
    else:
        print_table(["outcome", "messages "], counts.items())
    if counts["rejected"]:
        raise click.exceptions.Exit(1)


def _parse_line(line: bytes, number: int, kind: str | None) -> Any:
    try:
        return parse_body(line.rstrip(b"\r\n"), kind)
    except InvalidMessage as error:
        raise InvalidMessage(f"line {number}: {error}") from None


def _send_lines(
    producer: Producer,
    topic: str,
    bodies: Iterable[Any],
    empty: Iterable[int],
    options: dict[str, Any],
) -> dict[str, int]:
    """Send the bodies of all lines; returns the number of each outcome.

    empty: the numbers of the lines without a body that were read so far. An error says how many
    lines were sent before.
    """
    from lisa.producer.calls import pieces

    counts = {str(outcome): 0 for outcome in Sent}
    producer.send_many(topic, [], **options)  # checks the options before lines are read
    try:
        for piece in pieces(bodies):
            report = producer.send_many(topic, piece, **options)
            for name in counts:
                counts[name] += getattr(report, name)
    except LisaError as error:
        if sent := sum(counts.values()) + error.sent:
            for number in empty:
                sent += number <= sent
            error.args = (f"{error}; the first {sent} lines were sent",)
        raise
    return counts


@click.command("next")
@click.argument("topic", required=False)
@due_options
@calendar_options
@header_option
@click.option("--id", "message_id", metavar="ID", help="Explain this message of TOPIC instead.")
@key_option
@common
def next_(
    chosen: Chosen,
    topic: str | None,
    *,
    headers: tuple[str, ...],
    message_id: str | None,
    key: str | None,
    **given: Any,
) -> None:
    """Show when a message would be due, and why; with TOPIC, in the topic's window.

    Nothing is sent. The options are those of `lisa send`.
    """
    if message_id is not None and topic is None:
        raise click.UsageError("--id needs TOPIC")
    window = ""
    if topic:
        store = chosen.store()
        window = store.drive(store.options(topic)).window or ""
    now_ms = clock_ms()
    if message_id is not None:
        due, named = _stored(chosen, topic or "", whole_id(key, message_id), window, now_ms)
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


def _asked(
    chosen: Chosen, given: dict[str, Any], headers: dict[str, str], now_ms: int
) -> tuple[str, dict[str, str]]:
    """The due time that was asked for, and the headers that the message would have."""
    from lisa.producer.plan import due_text

    delay: timedelta | None = given["delay"]
    at: datetime | None = given["at"]
    check_zone(chosen, at, given["tz"])
    named = given["tz"] or chosen.zone
    zone = None if named is None else parse_zone(named)
    due = due_text(delay, at, given["at_ms"], zone)
    placed = place({**given, "headers": headers}, due, zone, now_ms)
    return due or "+0", placed.headers


def _stored(
    chosen: Chosen, topic: str, message_id: str, window: str, now_ms: int
) -> tuple[str, dict[str, str]]:
    """The due time and the headers of a stored message, without a wall time that was replaced."""
    found = chosen.producer().get(topic, message_id)
    # Garbage has the time of death instead, and a tombstone no headers.
    due_states = (State.WAITING, State.READY, State.IN_FLIGHT, State.RETRY)
    if found is None or found.due_ms is None or found.state not in due_states:
        fail(f"topic {topic}: message {shown_id(message_id)} is unknown, settled or in garbage")
    due_ms = found.due_ms
    return str(due_ms), without_past_local(found.headers or {}, due_ms, window, now_ms)


def _due_ms(due: str, headers: dict[str, str], window: str, now_ms: int) -> int:

    local_ms = due_again(headers, window, now_ms)
    if local_ms is not None:
        return local_ms
    applies = window_of(headers, window)
    due = due if applies is None else moved(due, applies, now_ms)
    return now_ms + int(due[1:]) if due.startswith("+") else int(due)
