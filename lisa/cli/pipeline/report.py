"""`lisa pipeline report`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from lisa.cli.options import duration, moment
from lisa.cli.output import print_json, print_table
from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import (
    ArchiveSource,
    JobOptions,
    archive_option,
    job_options,
    period,
    topic_option,
)
from lisa.core.model.clock import duration_ms, human, parse_zone

if TYPE_CHECKING:
    from lisa.pipeline.jobs.report import Report


@click.command()
@archive_option()
@click.option(
    "--to",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Directory for the page and its tables, or a URL such as s3a://bucket/report; an existing "
    "report is replaced.",
)
@topic_option
@click.option("--from", "start", type=moment, metavar="ISO", help="Events at or after this time.")
@click.option("--until", "end", type=moment, metavar="ISO", help="Events before this time.")
@click.option(
    "--zone",
    default="UTC",
    show_default=True,
    metavar="ZONE",
    help="Time zone of the page, and of --from and --until without an offset: Europe/Berlin, "
    "+08:00.",
)
@click.option(
    "--slo",
    type=duration,
    default="1s",
    show_default=True,
    help="Lateness up to which a delivery is on time.",
)
@job_options
def report(
    shared: JobOptions,
    *,
    source: ArchiveSource,
    to: str,
    topics: tuple[str, ...],
    start: datetime | None,
    end: datetime | None,
    zone: str,
    slo: timedelta,
) -> None:
    """Make a page of plots and tables from an archive: past traffic and scheduled messages.

    Writes the self-contained page DIR/report.html, and its tables to DIR/tables as Parquet and
    CSV. Does not connect to Redis. Exit code 2 if the archive has no such topic.
    """
    asked_zone = parse_zone(zone)
    start, end = period(start, end, until="--until", zone=asked_zone)
    with shared.session("report", source) as spark:
        from lisa.pipeline.jobs.message_history import topics_in
        from lisa.pipeline.jobs.report import report as run_job

        archive = source.open(spark)
        if topics:
            topics_in(archive, topics)  # raises ConfigError for an unknown topic
        found = run_job(
            archive,
            to,
            where=str(source.where),
            topics=topics,
            start=start,
            end=end,
            zone=asked_zone,
            slo=slo,
            stage=shared.show_stage,
        )
    if shared.json:
        print_json(found)
    else:
        _show(found, slo)


def _show(found: Report, slo: timedelta) -> None:
    from lisa.pipeline.jobs.report.formatting import human_us, kept

    def counts(*names: str) -> list[tuple[str, str]]:
        return [(name.replace("_", " "), f"{getattr(found, name):,}") for name in names]

    rows = [
        *counts("events", "accepted", "handled", "retried", "garbage"),
        ("lateness, p99", "" if found.p99_us is None else human_us(found.p99_us)),
        (f"within {human(duration_ms(slo))}", kept(found.within, found.deliveries)),
        ("delivered early", f"{found.early:,}"),
        *counts("to_come", "overdue"),
    ]
    print_table(["", " "], rows)
    if found.falling_behind:
        click.echo(f"falling behind: {', '.join(found.falling_behind)}")
    if found.gaps:
        click.echo(f"gaps in the journal: {found.gaps}; counts are too low")
    if not found.events:
        click.echo("the archive has no events in this range")
    click.echo(f"page: {found.page}")


if __name__ == "__main__":
    run(report)
