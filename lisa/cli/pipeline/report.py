"""`lisa pipeline report`."""

from __future__ import annotations

from datetime import datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, Moment, common, pass_chosen
from lisa.cli.pipeline.options import session, spark_options

if TYPE_CHECKING:
    from lisa.pipeline.jobs.report import Report

__all__ = ["report"]


@click.command()
@click.option("--archive", "where", required=True, metavar="DIR|JDBC", help="The archive.")
@click.option(
    "--to",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the page and its tables; a report in it is replaced.",
)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option("--from", "start", type=Moment(), metavar="ISO", help="Events at or after this time.")
@click.option("--until", "end", type=Moment(), metavar="ISO", help="Events before this time.")
@click.option(
    "--zone",
    default="UTC",
    show_default=True,
    metavar="ZONE",
    help="Of the page's hours, and of times without an offset: Europe/Berlin, +08:00.",
)
@click.option("--user", help="User of a JDBC archive.")
@click.option(
    "--password-file",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="File whose first line is that user's password.",
)
@spark_options
@common
@pass_chosen
def report(
    chosen: Chosen, where: str, *, to: Path, topics: tuple[str, ...], start: datetime | None,
    end: datetime | None, zone: str, user: str | None, password_file: Path | None, master: str,
    spark_conf: dict[str, str],
) -> None:  # fmt: skip
    """Make one page of plots and tables from an archive: what happened, and what is to come.

    The page is DIR/report.html and needs nothing but itself; its tables stand in DIR/tables as
    Parquet and CSV. No server is asked.
    """
    from lisa.cli.output import console, print_json
    from lisa.core.clock import parse_zone

    asked_zone = parse_zone(zone)
    start, end = _in(asked_zone, start), _in(asked_zone, end)
    if start is not None and end is not None and start >= end:
        raise click.UsageError("--from is not before --until")
    properties = {"user": user} if user else {}
    if password_file is not None:
        properties["password"] = (password_file.read_text("utf-8").splitlines() or [""])[0]
    with (
        console(err=True).status("starting Spark") as status,
        session("report", master, spark_conf) as spark,
    ):
        from lisa.pipeline.archive import open_archive
        from lisa.pipeline.jobs.report import report as make

        found = make(
            open_archive(spark, where, properties), to, where=where, topics=topics, start=start,
            end=end, zone=asked_zone, stage=status.update,
        )  # fmt: skip
    if chosen.json:
        print_json(_document(found))
    else:
        _show(found)


def _in(zone: tzinfo, moment: datetime | None) -> datetime | None:
    """A time without an offset is one of the page's zone."""
    if moment is None or moment.utcoffset() is not None:
        return moment
    return moment.replace(tzinfo=zone)


def _document(found: Report) -> dict[str, Any]:
    from dataclasses import asdict

    return {name: [str(path) for path in value] if name == "tables" else
            str(value) if isinstance(value, Path) else value
            for name, value in asdict(found).items()}  # fmt: skip


def _show(found: Report) -> None:
    from lisa.cli.output import print_table
    from lisa.pipeline.jobs.report.words import length

    late = "" if found.p99_us is None else length(found.p99_us)
    print_table(["", " "], [
        ("events", f"{found.events:,}"), ("accepted", f"{found.accepted:,}"),
        ("handled", f"{found.handled:,}"), ("retried", f"{found.retried:,}"),
        ("garbage", f"{found.garbage:,}"), ("lateness, p99", late),
        ("handed over early", f"{found.early:,}"), ("to come", f"{found.to_come:,}"),
        ("overdue", f"{found.overdue:,}"),
    ])  # fmt: skip
    if found.falling_behind:
        click.echo(f"falling behind: {', '.join(found.falling_behind)}")
    if found.gaps:
        click.echo(f"gaps in the journal: {found.gaps}; counts are too low")
    if not found.events:
        click.echo("the archive holds no events of this range")
    click.echo(f"page: {found.page}")


if __name__ == "__main__":
    from lisa.cli.pipeline import run

    run(report)
