"""`lisa pipeline archive`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, duration
from lisa.cli.output import print_json
from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import ArchiveSource, JobOptions, archive_options, job_options
from lisa.core.model.clock import human

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.jobs.archive import ArchiveResult, Progress


@click.command()
@archive_options("--to", "A directory, the URL of a directory, or a JDBC URL.")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    help="Only this topic; may be repeated. Default: all topics with a journal.",
)
@click.option("--once", is_flag=True, help="Stop after archiving all present events.")
@click.option(
    "--interval",
    type=duration,
    default="5s",
    show_default=True,
    help="Time between two batches.",
)
@click.option(
    "--max-events",
    type=click.IntRange(min=1),
    default=500_000,
    show_default=True,
    help="Maximum number of events in a batch.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name under which the archive reports its progress to the journal. Default: derived from "
    "--to.",
)
@click.option(
    "--on-gap",
    type=click.Choice(["fail", "record"]),
    default="fail",
    show_default=True,
    help="If events are missing: stop with an error, or record the gap and continue.",
)
@click.option(
    "--compact", "compact_only", is_flag=True, help="Only merge small files into large ones."
)
@click.option(
    "--keep",
    type=duration,
    default="1h",
    show_default=True,
    help="How long replaced files are kept for running readers.",
)
@click.option("--checkpoint", metavar="DIR", help="Spark's checkpoint; required for JDBC.")
@job_options
def archive(
    shared: JobOptions,
    *,
    source: ArchiveSource,
    topics: tuple[str, ...],
    compact_only: bool,
    keep: timedelta,
    checkpoint: str | None,
    **options: Any,
) -> None:
    """Write every transition to the tables message_log and messages, exactly once.

    Runs until SIGTERM or Ctrl-C, then finishes its batch. The next run continues where this one
    stopped, even if it was killed. The journal (topic option journal) keeps events until they are
    archived.

    Exit code 1 if the journal has a gap; the message names it.
    """
    where, server = str(source.where), shared.server()
    if source.is_database and checkpoint is None and not compact_only:
        raise click.UsageError("an archive in a database needs --checkpoint DIR")
    if compact_only and source.is_database:
        raise click.UsageError("--compact is only for archives in files, not in a database")
    # Each batch prints a line.
    session = shared.session("archive", source, progress=compact_only)
    with _stopping() as stop, session as spark:
        if compact_only:
            _compact(spark, where, keep, shared.chosen)
            return
        from lisa.pipeline.jobs.archive import archive as run_job

        _catch(stop)  # Spark has installed its own handler
        done = run_job(
            spark,
            where,
            topics=topics or None,
            checkpoint=checkpoint,
            keep=keep,
            properties=source.properties,
            stop=stop,
            progress=_print_batch_as_json if shared.json else _print_batch,
            url=server.url,
            prefix=server.prefix,
            **options,
        )
    _print_result(done, shared.chosen)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; restores the previous handlers on exit."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = threading.Event()
    _catch(stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _catch(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def _compact(spark: SparkSession, where: str, keep: timedelta, chosen: Chosen) -> None:
    from lisa.pipeline.archive import open_archive
    from lisa.pipeline.archive.writing import FileWriter

    open_archive(spark, where)  # raises ConfigError if there is none; the writer would create it
    writer = FileWriter(spark, where, keep=keep)
    files = writer.compact(everything=True)
    writer.delete_old()
    left = writer.file_count()
    merged, kept = _count(files, "file"), _count(left, "file")
    line = f"{merged} merged; the archive now has {kept}"
    chosen.answer({"where": where, "compacted": files, "files": left}, line)


def _print_batch_as_json(one: Progress) -> None:
    gaps = [gap.reason for gap in one.gaps]
    print_json(asdict(one) | {"seconds": round(one.seconds, 3), "gaps": gaps})


def _print_batch(one: Progress) -> None:
    """Print a batch to stderr."""
    lag = "" if one.lag_ms is None else f", {human(one.lag_ms)} behind"
    rate = one.events / max(one.seconds, 0.001)
    events = _count(one.events, "event")
    click.echo(f"batch {one.batch}: {events}, {rate:,.0f}/s{lag}", err=True)
    for gap in one.gaps:
        click.echo(f"gap: {gap.reason}", err=True)


def _print_result(done: ArchiveResult, chosen: Chosen) -> None:
    from lisa.pipeline.paths import without_password

    gaps = [gap.reason for gap in done.gaps]
    where = without_password(done.where)
    recorded = f", {_count(len(gaps), 'gap')} recorded" if gaps else ""
    chosen.answer(
        asdict(done) | {"where": where, "seconds": round(done.seconds, 3), "gaps": gaps},
        f"{_count(done.events, 'event')} archived in {_count(done.batches, 'batch', 'batches')} "
        f"({done.seconds:,.1f} s){recorded}: {where}",
    )


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


if __name__ == "__main__":
    run(archive)
