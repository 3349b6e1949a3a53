"""`lisa pipeline retain`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta

import click

from lisa.cli.options import duration
from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import ArchiveSource, JobOptions, archive_option, job_options


@click.command()
@archive_option()
@click.option(
    "--keep",
    type=duration,
    required=True,
    help="Delete messages that ended longer ago than this, as in 400d.",
)
@job_options
def retain(shared: JobOptions, *, source: ArchiveSource, keep: timedelta) -> None:
    """Delete messages that ended more than --keep ago, with all of their events.

    Keeps live messages and the records of gaps. Stop `lisa pipeline archive` first. If the command
    is interrupted, run it again.
    """
    with shared.session("retain", source) as spark:
        from lisa.pipeline.jobs.deletion import retain as run_job

        done = run_job(spark, str(source.where), keep)
    shared.chosen.answer(
        asdict(done) | {"seconds": round(done.seconds, 3)},
        f"{done.messages:,} messages and {done.events:,} events deleted ({done.seconds:,.1f} s)",
    )


if __name__ == "__main__":
    run(retain)
