"""`lisa pipeline search`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, Moment, common, pass_chosen
from lisa.cli.pipeline.archives import Source, archive_options
from lisa.cli.pipeline.options import connection, session, spark_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

__all__ = ["search"]


@click.command()
@archive_options(required=False)
@click.option(
    "--live/--no-live", default=True, show_default=True, help="Whether to search the queue."
)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option("--id", "ids", multiple=True, help="This message; may be repeated.")
@click.option("--state", "states", multiple=True, help="In this state; may be repeated.")
@click.option("--due-after", type=Moment(), metavar="ISO", help="Due at or after this time.")
@click.option("--due-before", type=Moment(), metavar="ISO", help="Due before this time.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="CONDITION",
    help="On a JSON body: '$.order=42', with = != < > <= >= or ~ (a regular expression);"
    " may be repeated.",
)
@click.option("--where", "condition", metavar="SQL", help="Any condition on the columns.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=50,
    show_default=True,
    help="So many are shown; --out takes all.",
)
@click.option("--out", metavar="DIR", help="Write all that is found there.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "csv", "json"]),
    default="parquet",
    show_default=True,
    help="The form of --out.",
)
@spark_options
@common
@pass_chosen
def search(
    chosen: Chosen, *, source: Source, live: bool, topics: tuple[str, ...],
    ids: tuple[str, ...], states: tuple[str, ...], due_after: datetime | None,
    due_before: datetime | None, fields: tuple[str, ...], condition: str | None, limit: int,
    out: str | None, form: str, master: str, spark_conf: dict[str, str],
) -> None:  # fmt: skip
    """Find messages in an archive and in the queue together.

    What both know is told as the queue has it now. Exit code 1 if nothing is found.
    """
    from lisa.core.keys import check_topic

    if not live and not source:
        raise click.UsageError("nothing to search in: give --archive, or leave --no-live out")
    for topic in topics:
        check_topic(topic)
    options = connection(chosen)
    with session("search", master, source.settings(spark_conf)) as spark:
        from lisa.pipeline.jobs.fields import FieldTest
        from lisa.pipeline.jobs.search import STATES, Query
        from lisa.pipeline.jobs.search import search as run
        from lisa.pipeline.jobs.server import Server

        unknown = [state for state in states if state not in STATES]
        if unknown:
            raise click.UsageError(f"no state {unknown[0]!r}; there are {', '.join(STATES)}")
        query = Query(
            topics=topics or None, ids=ids or None, states=states or None,
            due_after=aware("--due-after", due_after), due_before=aware("--due-before", due_before),
            fields=[FieldTest.parse(one) for one in fields], where=condition,
        )  # fmt: skip
        found = run(
            spark, query, archive=source.open(spark) if source else None,
            server=Server(options["url"], options["prefix"]) if live else None,
        )  # fmt: skip
        shown = found if out is None else _written(found, out, form)
        some = shown.limit(limit + 1).collect()
    _show(chosen, some[:limit], is_more=len(some) > limit)
    if out is not None:
        click.echo(f"all of them: {out}", err=True)
    if not some:
        raise click.exceptions.Exit(1)


def aware(option: str, moment: datetime | None) -> datetime | None:
    """A time that says its zone, or a usage error."""
    if moment is not None and moment.utcoffset() is None:
        raise click.UsageError(
            f"{option} {moment.isoformat()} names no time zone; add Z or an offset (+01:00)"
        )
    return moment


def _written(found: DataFrame, out: str, form: str) -> DataFrame:
    """Write everything; the same rows, kept, so that showing some needs no second search."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as sf

    from lisa.core.errors import ConfigError

    kept = found.drop("body_json")
    shown = kept.cache()
    if form == "csv":
        kept = kept.drop("body").withColumns(
            {name: sf.to_json(name) for name in ("groups", "headers")}
        )
    writer = kept.write
    if form == "csv":
        writer = writer.option("header", "true").option("escape", '"')
    try:
        writer.format(form).save(out)
    except AnalysisException as error:
        raise ConfigError(f"--out {out}: {(error.getMessage() or str(error)).strip()}") from None
    return shown


def _show(chosen: Chosen, rows: list[Row], *, is_more: bool) -> None:
    from lisa.cli.output import print_json, print_table

    if chosen.json:
        print_json({"messages": [_fields(row) for row in rows], "more": is_more})
        return
    if rows:
        print_table(
            ["topic", "id", "state", "due", "attempts ", "source", "body"],
            [(row.topic, row.id, row.state, _iso(row.due), row.attempts, row.source,
              _shown(row)) for row in rows],
        )  # fmt: skip
    else:
        click.echo("nothing found", err=True)
    if is_more:
        click.echo("there are more: raise --limit, or write all with --out", err=True)


BODY_CHARACTERS = 80


def _shown(row: Row) -> str:
    text = row.body_text if row.body_text is not None else repr(bytes(row.body or b""))
    return text if len(text) <= BODY_CHARACTERS else f"{text[: BODY_CHARACTERS - 1]}…"


def _iso(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    # Spark hands out naive local times.
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(row: Row) -> dict[str, Any]:
    from lisa.cli.output import body_fields
    from lisa.core.envelope import decode_body
    from lisa.core.errors import InvalidMessage

    found: dict[str, Any] = row.asDict(recursive=True)
    for name in ("body_text", "body_json"):
        found.pop(name, None)
    kind, body = found.pop("kind"), bytes(found.pop("body") or b"")
    try:
        decoded = decode_body(kind or "b", body)
    except InvalidMessage:  # said to be JSON or text, and is not
        decoded = body
    for place in found["groups"] or ():
        place["due"] = _iso(place["due"])
    dates = {name: _iso(found[name]) for name in
             ("due", "expires", "sent_at", "updated_at", "settled_at")}  # fmt: skip
    return found | dates | body_fields(decoded)


if __name__ == "__main__":
    from lisa.cli.pipeline import run

    run(search)
