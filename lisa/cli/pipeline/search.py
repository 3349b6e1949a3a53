"""`lisa pipeline search`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import moment, whole_id
from lisa.cli.output import body_fields, iso, print_json, print_table
from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import (
    ArchiveSource,
    JobOptions,
    archive_option,
    aware,
    id_option,
    job_options,
    topic_option,
)
from lisa.core.model.envelope import decode_body
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_topic, shown_id
from lisa.core.model.sharding import key_of
from lisa.pipeline.paths import absolute

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from lisa.pipeline.jobs.search import Query


TIMES = ("due", "expires", "sent_at", "updated_at", "settled_at")


@click.command()
@archive_option(required=False)
@click.option("--live/--no-live", default=True, show_default=True, help="Search the queue too.")
@topic_option
@id_option
@click.option("--key", help="Only messages of this key; the ids are then those within the key.")
@click.option("--state", "states", multiple=True, help="Only this state; may be repeated.")
@click.option("--due-after", type=moment, metavar="ISO", help="Due at or after this time.")
@click.option("--due-before", type=moment, metavar="ISO", help="Due before this time.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="CONDITION",
    help="Condition on a JSON body: '$.order=42', with = != < > <= >= or ~ (a regular "
    "expression); may be repeated.",
)
@click.option("--where", "condition", metavar="SQL", help="SQL condition on the columns.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=50,
    show_default=True,
    help="Maximum number of messages to show; --out writes all of them.",
)
@click.option("--out", metavar="DIR", help="Directory to write all matches to.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "csv", "json"]),
    default="parquet",
    show_default=True,
    help="Format of --out.",
)
@job_options
def search(
    shared: JobOptions,
    *,
    source: ArchiveSource,
    live: bool,
    limit: int,
    out: str | None,
    form: str,
    **conditions: Any,
) -> None:
    """Find messages in an archive and in the queue.

    A message found in both is shown with its present state in the queue. Exit code 1 if nothing
    matches.
    """
    if not live and not source:
        raise click.UsageError("nothing to search: add --archive, or remove --no-live")
    for topic in conditions["topics"]:
        check_topic(topic)
    server = shared.server()
    with shared.session("search", source) as spark:
        from lisa.pipeline.jobs.search import search as run_job

        found = run_job(
            spark,
            _query(**conditions),
            archive=source.open(spark) if source else None,
            server=server if live else None,
        )
        shown = found if out is None else _written(found, out, form)
        some = _in_ms(shown.limit(limit + 1)).collect()
    _show(some[:limit], is_more=len(some) > limit, as_json=shared.json)
    if out is not None:
        click.echo(f"all matches: {out}", err=True)
    if not some:
        raise click.exceptions.Exit(1)


def _query(
    *,
    topics: tuple[str, ...],
    ids: tuple[str, ...],
    key: str | None,
    states: tuple[str, ...],
    due_after: datetime | None,
    due_before: datetime | None,
    fields: tuple[str, ...],
    condition: str | None,
) -> Query:
    from lisa.pipeline.jobs.search import STATES, FieldTest, Query

    unknown = [state for state in states if state not in STATES]
    if unknown:
        raise click.UsageError(f"no state {unknown[0]!r}; the states are {', '.join(STATES)}")
    return Query(
        topics=topics or None,
        ids=[whole_id(key, message_id) for message_id in ids] or None,
        key=key,
        states=states or None,
        due_after=aware("--due-after", due_after),
        due_before=aware("--due-before", due_before),
        fields=[FieldTest.parse(field) for field in fields],
        where=condition,
    )


def _written(found: DataFrame, out: str, form: str) -> DataFrame:
    """Write all rows to `out`, and return them cached, so that showing some repeats no search."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as sf

    from lisa.pipeline.session import persisted

    kept = found.drop("body_json")
    shown = persisted(kept)
    writer = kept.write
    if form == "csv":
        texts = {name: sf.to_json(name) for name in ("groups", "headers")}
        writer = kept.drop("body").withColumns(texts).write.options(header="true", escape='"')
    try:
        writer.format(form).save(absolute(out))
    except AnalysisException as error:
        raise ConfigError(f"--out {out}: {(error.getMessage() or str(error)).strip()}") from None
    return shown


def _show(rows: list[Row], *, is_more: bool, as_json: bool) -> None:
    if as_json:
        print_json({"messages": [_fields(row) for row in rows], "more": is_more})
        return
    if rows:
        print_table(
            ["topic", "id", "state", "due", "attempts ", "source", "body"],
            [
                (
                    row.topic,
                    shown_id(row.id),
                    row.state,
                    iso(row.due),
                    row.attempts,
                    row.source,
                    _shown(row),
                )
                for row in rows
            ],
        )
    else:
        click.echo("nothing found", err=True)
    if is_more:
        click.echo("there are more matches: raise --limit, or write all with --out", err=True)


BODY_CHARACTERS = 80


def _shown(row: Row) -> str:
    text = row.body_text if row.body_text is not None else repr(bytes(row.body or b""))
    return text if len(text) <= BODY_CHARACTERS else f"{text[: BODY_CHARACTERS - 1]}…"


def _in_ms(found: DataFrame) -> DataFrame:
    """Times as epoch milliseconds: Spark returns local times, which may be in the year 10000."""
    from pyspark.sql import functions as sf

    groups = sf.transform("groups", lambda one: one.withField("due", sf.unix_millis(one["due"])))
    times = {name: sf.unix_millis(name) for name in TIMES}
    return found.withColumns({"groups": groups, **times})


def _fields(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = row.asDict(recursive=True)
    for name in ("body_text", "body_json"):
        found.pop(name, None)
    kind, body = found.pop("kind"), bytes(found.pop("body") or b"")
    try:
        decoded = decode_body(kind or "b", body)
    except InvalidMessage:  # marked as JSON or text but not valid
        decoded = body
    for group in found["groups"] or ():
        group["due"] = iso(group["due"])
    times = {name: iso(found[name]) for name in TIMES}
    return found | {"key": key_of(found["id"])} | times | body_fields(decoded)


if __name__ == "__main__":
    run(search)
