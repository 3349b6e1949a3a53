"""`lisa send`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from lisa.cli.options import (
    Chosen,
    Duration,
    check_zone,
    common,
    due_options,
    pass_chosen,
)
from lisa.core.errors import InvalidMessage

if TYPE_CHECKING:
    from lisa.producer import Producer

__all__ = ["send"]


@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@due_options
@click.option("--id", "message_id", metavar="ID", help="An id of your own.")
@click.option("--ttl", type=Duration(), metavar="DURATION", help="Worth it so long after due.")
@click.option("--retry", metavar="DELAYS", help="Its own retry delays: 0,0,2m,10m; '' for none.")
@click.option("--header", "headers", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
@click.option(
    "--on-duplicate", type=click.Choice(["keep", "replace", "reject"]), default="keep",
    show_default=True, help="What becomes of a message whose id is known.",
)  # fmt: skip
@click.option("--json-body", "kind", flag_value="json", help="BODY is JSON, else it is refused.")
@click.option("--text", "kind", flag_value="text", help="BODY is text, also if it looks like JSON.")
@click.option(
    "--file", "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Send each line of this file as a message; - for stdin.",
)  # fmt: skip
@common
@pass_chosen
def send(
    chosen: Chosen, topic: str, body: str | None, *, delay: timedelta | None, at: datetime | None,
    at_ms: int | None, tz: str | None, message_id: str | None, ttl: timedelta | None,
    retry: str | None, headers: tuple[str, ...], on_duplicate: str, kind: str | None,
    file: Path | None,
) -> None:  # fmt: skip
    """Send BODY to TOPIC, due now or as --delay, --at or --at-ms says; prints the message's id.

    BODY that reads as JSON is sent as JSON (42 is a number), anything else as text; --json-body
    and --text say which. BODY - reads all of stdin.
    """
    if (body is None) == (file is None):
        raise click.UsageError("give either BODY or --file")
    if file is not None and message_id is not None:
        raise click.UsageError("--id names one message; a file holds many")
    producer = chosen.producer()
    check_zone(chosen, at, tz)
    options: dict[str, Any] = {
        "delay": delay, "at": at, "at_ms": at_ms, "tz": tz, "ttl": ttl, "retry": retry,
        "headers": _headers(headers), "on_duplicate": on_duplicate,
    }  # fmt: skip
    if file is not None:
        _send_file(chosen, producer, topic, file, kind=kind, options=options)
        return
    given = (body or "").encode("utf-8", "surrogateescape")
    data = sys.stdin.buffer.read() if body == "-" else given
    sent = producer.send(topic, _body(data, kind), id=message_id, **options)
    if chosen.json:
        from lisa.cli.output import print_json

        print_json({"topic": topic, "id": sent})
    else:
        click.echo(sent)


def _headers(pairs: Iterable[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--header {pair!r} is not KEY=VALUE")
        found[name] = value
    return found


def _body(data: bytes, kind: str | None) -> Any:
    """JSON where it is wanted or found, else text; bytes that are no text stay bytes."""
    import msgspec

    if kind != "text":
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if kind == "json":
                raise InvalidMessage(f"the body is no JSON: {error}") from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _send_file(
    chosen: Chosen, producer: Producer, topic: str, path: Path, *, kind: str | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from lisa.cli.output import console, print_json, print_table

    with click.open_file(str(path), "rb") as lines:
        total = None if str(path) == "-" else path.stat().st_size
        bar = Progress(
            TextColumn("{task.fields[sent]} sent"), BarColumn(), MofNCompleteColumn(),
            console=console(err=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        with bar:
            task = bar.add_task("", total=total, sent=0)

            def bodies(source: IO[bytes]) -> Iterator[Any]:
                done = 0
                for count, line in enumerate(source, 1):
                    done += len(line)
                    yield _body(line.rstrip(b"\r\n"), kind)
                    if count % 500 == 0:
                        bar.update(task, completed=done, sent=count)

            report = producer.send_many(topic, bodies(lines), **options)
    counts = {
        "accepted": report.accepted, "duplicate": report.duplicate,
        "replaced": report.replaced, "rejected": report.rejected,
    }  # fmt: skip
    if chosen.json:
        print_json({"topic": topic, **counts})
    else:
        print_table(["outcome", "messages "], counts.items())
    if report.rejected:
        raise click.exceptions.Exit(1)
