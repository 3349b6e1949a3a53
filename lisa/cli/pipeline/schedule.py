"""`lisa pipeline schedule`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import click

from lisa.cli.options import Chosen, Duration, common, pass_chosen
from lisa.cli.pipeline import run
from lisa.cli.pipeline.options import connection, session, spark_options
from lisa.core.errors import ConfigError, InvalidMessage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from lisa.pipeline.jobs.schedule import Scheduled

__all__ = ["schedule"]

FORMATS = ("parquet", "csv", "json", "table")
ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
CORRUPT = "_corrupt_record"


def _pairs(
    ctx: click.Context,  # noqa: ARG001 - click's signature
    param: click.Parameter,
    value: tuple[str, ...],
) -> dict[str, str]:
    for pair in value:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE, as in sep=;", param=param)
    return dict(pair.split("=", 1) for pair in value)


@click.command()
@click.argument("source")
@click.option("--topic", help="Where all rows go.")
@click.option("--topic-column", metavar="COL", help="The column that names each row's topic.")
@click.option("--format", "kind", type=click.Choice(FORMATS),
              help="What SOURCE is; by default its ending says so, else parquet.")  # fmt: skip
@click.option("--read-option", metavar="NAME=VALUE", multiple=True, callback=_pairs,
              help="An option of Spark's reader, as in sep=';'; may be repeated.")  # fmt: skip
@click.option("--body", metavar="COL|*",
              help="The body; * is the row as JSON. Default: column body, else *.")  # fmt: skip
@click.option("--body-format", type=click.Choice(["text", "json"]), default="text",
              show_default=True, help="What bodies of text are.")  # fmt: skip
@click.option("--id", "id_", metavar="COL", help="Ids. Default: column id, if there is one.")
@click.option("--due", metavar="COL",
              help="Timestamps, ISO text or epoch milliseconds. Default: column due.")  # fmt: skip
@click.option("--delay", metavar="COL|DURATION",
              help="Delays: a column, or 30m for all. Default: column delay.")  # fmt: skip
@click.option("--ttl", metavar="COL|DURATION", help="How long after due. Default: column ttl.")
@click.option("--retry", metavar="COL|DELAYS",
              help="Pauses between attempts, as in 0,0,2m. Default: column retry.")  # fmt: skip
@click.option("--headers", metavar="COL", help="map<string,string>. Default: column headers.")
@click.option("--job", metavar="NAME",
              help="Needed without ids: they are made from it and the rows.")  # fmt: skip
@click.option("--on-duplicate", type=click.Choice(["keep", "replace", "reject"]), default="keep",
              show_default=True, help="What becomes of a known id.")  # fmt: skip
@click.option("--max-rate", type=click.FloatRange(min=0, min_open=True), metavar="N",
              help="Rows a second, at most.")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Rows of one script call.")
@click.option("--dedupe-for", type=Duration(), metavar="DURATION",
              help="How long ids are remembered, at least.")  # fmt: skip
@click.option("--patience", type=Duration(), metavar="DURATION", default="10s", show_default=True,
              help="How long to wait for the server, and for room in a full topic.")  # fmt: skip
@click.option("--report", metavar="FILE", help="Where the counts go, as JSON.")
@click.option("--refused", metavar="DIR", help="Where rows go that were not sent, with reasons.")
@spark_options
@common
@pass_chosen
def schedule(
    chosen: Chosen, source: str, *, topic: str | None, topic_column: str | None, kind: str | None,
    read_option: dict[str, str], body: str | None, body_format: str, id_: str | None,
    due: str | None, delay: str | None, ttl: str | None, retry: str | None, headers: str | None,
    job: str | None, on_duplicate: str, max_rate: float | None, batch: int | None,
    dedupe_for: timedelta | None, patience: timedelta, report: str | None, refused: str | None,
    master: str, spark_conf: dict[str, str],
) -> None:  # fmt: skip
    """Send the rows of SOURCE, a file, a directory, a URL or a table, as messages.

    A job that failed, or is run again within --dedupe-for, adds nothing twice. Exit code 1 if rows
    were refused: they are counted, and written to --refused.
    """
    if topic is not None and topic_column is not None:
        raise click.UsageError("give one of --topic and --topic-column")
    if due is not None and delay is not None:
        raise click.UsageError("give one of --due and --delay")
    where = connection(chosen)
    named = {"id": id_, "due": due, "delay": delay, "ttl": ttl, "retry": retry,
             "headers": headers, "topic": topic_column, "body": body}  # fmt: skip
    with session("pipeline schedule", master, spark_conf) as spark:
        from lisa.pipeline.jobs.schedule import schedule as send

        table = _read(spark, source, kind, read_option)
        rows = _as_messages(table, named, all_to=topic)
        with _Bar() as bar:
            done = send(
                rows, topic=topic, job=job, on_duplicate=on_duplicate, batch=batch,
                max_rate=max_rate, dedupe_for=dedupe_for, patience=patience,
                body_format=body_format, report=report, refused=refused, progress=bar.show,
                **where,
            )  # fmt: skip
    _tell(chosen, done, refused)
    if done.refused:
        raise click.exceptions.Exit(1)


def _read(spark: SparkSession, source: str, kind: str | None, options: dict[str, str]) -> DataFrame:
    if kind is None:
        ends = (mark for ending, mark in ENDINGS.items()
                if source.lower().removesuffix(".gz").endswith(ending))  # fmt: skip
        kind = next(ends, "parquet")
    if kind == "table":
        return spark.table(source)
    reader = spark.read.format(kind)
    if kind == "csv":
        # Types are not guessed: an id 007 is to stay one. What is a time or a number is read below.
        reader = reader.options(header="true")
    return reader.options(**options).load(source)


def _as_messages(
    table: DataFrame, named: dict[str, str | None], *, all_to: str | None
) -> DataFrame:
    """The columns of messages, from those that the options name, else those of the same name."""
    from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

    made: list[Column] = []
    for name, wanted in named.items():
        if name == "body":
            continue
        other = {"due": "delay", "delay": "due"}.get(name)
        if wanted is None:
            if name not in table.columns or (name == "topic" and all_to is not None):
                continue
            if other is not None and named[other] is not None:
                continue
            wanted = name  # noqa: PLW2901
        made.append(_column(table, name, wanted).alias(name))
    body = named["body"] or ("body" if "body" in table.columns else "*")
    if body == "*":
        whole = [F.col(f"`{name}`") for name in table.columns if name != CORRUPT]
        content = F.struct(*whole)
    else:
        content = _existing(table, "body", body)
    if CORRUPT in table.columns:
        content = F.when(F.col(CORRUPT).isNull(), content)  # a line that is none is refused
    return table.select(*made, content.alias("body"))


def _existing(table: DataFrame, name: str, wanted: str) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    if wanted not in table.columns:
        raise ConfigError(f"--{name}: there is no column {wanted!r}; columns are "
                          f"{', '.join(table.columns)}")  # fmt: skip
    return F.col(f"`{wanted}`")


def _column(table: DataFrame, name: str, wanted: str) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    if wanted not in table.columns and name in ("delay", "ttl", "retry"):
        return _constant(name, wanted, table.columns)
    column = _existing(table, name, wanted)
    if table.schema[wanted].dataType.simpleString() != "string":
        return column
    if name == "due":
        # Epoch milliseconds, or a time; never early, so its microseconds are rounded up.
        micros = F.unix_micros(column.try_cast("timestamp"))
        up = ((micros + F.pmod(-micros, F.lit(1000))) / 1000).cast("bigint")
        return F.coalesce(column.try_cast("bigint"), up)
    if name in ("delay", "ttl"):
        return column.try_cast("bigint")
    return column


def _constant(name: str, value: str, columns: list[str]) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    from lisa.core.clock import duration_ms, parse_duration
    from lisa.core.retry_policy import RetryPolicy

    try:
        if name == "retry":
            RetryPolicy.parse(value)
            return F.lit(value)
        return F.lit(duration_ms(parse_duration(value))).cast("bigint")
    except InvalidMessage as error:
        raise ConfigError(
            f"--{name}: {value!r} is neither a column ({', '.join(columns)}) nor a value: {error}"
        ) from None


class _Bar:
    """A progress bar on stderr, where somebody looks."""

    def __enter__(self) -> Self:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from lisa.cli.output import console

        screen = console(err=True)
        self._progress = Progress(
            TextColumn("tasks"), BarColumn(), MofNCompleteColumn(), console=screen,
            disable=not screen.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=None)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, done: int, total: int) -> None:
        """So many tasks are through."""
        self._progress.update(self._task, completed=done, total=total)


def _tell(chosen: Chosen, done: Scheduled, directory: str | None) -> None:
    from lisa.cli.output import print_json, print_table

    if chosen.json:
        print_json(done)
        return
    rows: list[tuple[Any, ...]] = [
        (topic, one.accepted, one.duplicate, one.replaced, one.refused)
        for topic, one in done.topics.items()
    ]
    print_table(["topic", "accepted ", "duplicate ", "replaced ", "refused "], rows)
    for reason in done.reasons:
        click.echo(f"lisa: refused {reason}", err=True)
    if done.refused and directory:
        click.echo(f"lisa: all {done.refused} are in {directory}", err=True)


if __name__ == "__main__":
    run(schedule)
