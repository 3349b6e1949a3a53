"""`lisa pipeline schedule`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import duration, moment
from lisa.cli.output import print_json, print_table, progress_bar
from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import JobOptions, aware, job_options, pairs
from lisa.core.transitions.enqueue import OnDuplicate

if TYPE_CHECKING:
    from lisa.pipeline.jobs.schedule import Scheduled

COUNTS = ("accepted", "duplicate", "replaced", "replaced_in_flight", "updated", "refused")
FORMATS = ("parquet", "orc", "csv", "tsv", "json", "delta", "table")

COLUMN_OPTIONS = (
    "id",
    "key",
    "due",
    "delay",
    "at_local",
    "tz",
    "window",
    "ttl",
    "retry",
    "late",
    "cost",
    "slack",
    "headers",
    "body",
    "cancelled",
)
"""Options that name the column of a part of the message; all other options go to the job."""


@click.command()
@click.argument("source")
@click.option("--topic", help="Topic of all rows.")
@click.option("--topic-column", metavar="COL", help="Column with the topic of each row.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Format of SOURCE. Default: from the names of its files.",
)
@click.option(
    "--read-option",
    metavar="NAME=VALUE",
    multiple=True,
    callback=pairs("sep=;"),
    help="Option for Spark's reader, as in sep=';'; may be repeated.",
)
@click.option(
    "--schema",
    metavar="DDL",
    help="Types of a CSV or of JSON lines, as in 'order long, paid boolean'. Default: those of "
    "JSON; numbers and Booleans of a CSV if they look the same when printed.",
)
@click.option(
    "--body",
    metavar="COL|*",
    help="Body; * is the whole row as JSON. Default: column body, else the row without the columns "
    "of other parts.",
)
@click.option(
    "--body-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of text bodies.",
)
@click.option("--id", metavar="COL", help="Ids. Default: column id, if there is one.")
@click.option("--key", metavar="COL", help="Keys, such as that of an order.")
@click.option(
    "--due", metavar="COL", help="Timestamps, ISO text or epoch milliseconds. Default: column due."
)
@click.option(
    "--delay",
    metavar="COL|DURATION",
    help="Delay: a column, or a duration such as 30m for all rows. Default: column delay.",
)
@click.option(
    "--at-local",
    metavar="COL",
    help="Wall times, ISO text as in 2026-12-24T09:00, in the zone that --tz gives.",
)
@click.option(
    "--tz",
    metavar="COL|ZONE",
    help="Time zones: a column, or one zone for all rows. With --due: the zone of timestamps "
    "without one.",
)
@click.option(
    "--window",
    metavar="COL|WINDOW",
    help="Windows of delivery: a column, or one such as 'mon-fri 9-17' for all rows.",
)
@click.option("--ttl", metavar="COL|DURATION", help="Time to live after due. Default: column ttl.")
@click.option(
    "--retry",
    metavar="COL|DELAYS",
    help="Delays between attempts, as in 0,0,2m. Default: column retry.",
)
@click.option(
    "--late",
    metavar="COL|POLICY",
    help="Late policies: a column, or one such as 'skip after 10m' for all rows.",
)
@click.option("--cost", metavar="COL|N", help="Costs: a column, or one number for all rows.")
@click.option(
    "--slack",
    metavar="COL|DURATION",
    help="How much later rows may start without harm: a column, or a duration for all rows.",
)
@click.option(
    "--headers", metavar="COL", help="Headers, map<string,string>. Default: column headers."
)
@click.option(
    "--job",
    metavar="NAME",
    help="Name of the job; required if rows have no ids. Ids are derived from name and row.",
)
@click.option(
    "--on-duplicate",
    type=click.Choice([mode.value for mode in OnDuplicate]),
    default="keep",
    show_default=True,
    help="What to do with an id that already exists.",
)
@click.option(
    "--max-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Maximum number of rows per second.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", help="Maximum number of rows per call."
)
@click.option(
    "--dedupe-for",
    type=duration,
    metavar="DURATION",
    help="Minimum time for which the topic deduplicates ids.",
)
@click.option(
    "--patience",
    type=duration,
    metavar="DURATION",
    default="10s",
    show_default=True,
    help="How long to wait for the server, and for space in a full topic.",
)
@click.option(
    "--due-within",
    type=duration,
    metavar="DURATION",
    help="Send rows due within this time, and those due since --job last ran; repeat it often.",
)
@click.option("--since", type=moment, help="Earliest due time in the first run. Default: now.")
@click.option("--cancelled", metavar="COL", help="Column that is set in rows not to be sent.")
@click.option("--sync", is_flag=True, help="Have messages follow their rows while they wait.")
@click.option("--report", metavar="FILE", help="File for the counts, as JSON.")
@click.option("--refused", metavar="DIR", help="Directory for refused rows and their reasons.")
@job_options
def schedule(
    shared: JobOptions,
    source: str,
    *,
    topic: str | None,
    topic_column: str | None,
    kind: str | None,
    read_option: dict[str, str],
    schema: str | None,
    **options: Any,
) -> None:
    """Send the rows of SOURCE (a file, directory, URL or table) as messages.

    Safe to repeat: a second run within --dedupe-for sends no row twice. Exit code 1 if rows were
    refused; they are counted, and written to --refused.
    """
    if topic is not None and topic_column is not None:
        raise click.UsageError("give --topic or --topic-column, not both")
    if sum(options[name] is not None for name in ("due", "delay", "at_local")) > 1:
        raise click.UsageError("give one of --due, --delay and --at-local")
    options["since"] = aware("--since", options["since"])
    server = shared.server()
    columns = {name: options.pop(name) for name in COLUMN_OPTIONS}
    columns["topic"] = topic_column
    with shared.session("schedule") as spark, progress_bar("tasks") as bar:
        task = bar.add_task("", total=None)
        from lisa.cli.pipeline.schedule_source import TIMES, as_messages, overlooked, read
        from lisa.pipeline.jobs.schedule import schedule as run_job

        found = read(spark, source, kind, read_option, schema)
        rows = as_messages(found, columns, all_to=topic)
        for name, part in overlooked(found.names, columns).items():
            click.echo(
                f"lisa: the column {name!r} is data; --{part} {name!r} would use it", err=True
            )
        done = run_job(
            rows,
            topic=topic,
            cancelled=columns["cancelled"] and "cancelled",
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            url=server.url,
            prefix=server.prefix,
            **options,
        )
    _print_result(done, options["refused"], as_json=shared.json)
    if TIMES.isdisjoint(rows.columns) and not shared.json:
        click.echo("lisa: no column and no option gives a time: all rows are due now", err=True)
    if done.refused:
        raise click.exceptions.Exit(1)


def _print_result(done: Scheduled, directory: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    rows = [
        (topic, *(getattr(counts, name) for name in COUNTS))
        for topic, counts in done.topics.items()
    ]
    print_table(["topic", *(f"{name} " for name in COUNTS)], rows)
    if done.rescheduled or done.cancelled:
        click.echo(f"{done.rescheduled} rescheduled, {done.cancelled} cancelled")
    for reason in done.reasons:
        click.echo(f"lisa: refused {reason}", err=True)
    if done.refused and directory:
        click.echo(f"lisa: all {done.refused} refused rows are in {directory}", err=True)


if __name__ == "__main__":
    run(schedule)
