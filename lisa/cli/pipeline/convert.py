"""`lisa pipeline convert`."""

from __future__ import annotations

import click

from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import ArchiveSource, JobOptions, job_options


@click.command()
@click.argument("where", metavar="ARCHIVE")
@job_options
def convert(shared: JobOptions, where: str) -> None:
    """Convert an archive in files that an earlier version wrote to Delta tables, in place.

    ARCHIVE is a directory or a URL that Hadoop supports. It needs space for a second copy of the
    log; stop `lisa pipeline archive` first. If the conversion is interrupted, run it again. A
    converted archive remains as it is.
    """
    if where.startswith("jdbc:"):
        raise click.UsageError("an archive in a database needs no conversion")
    with shared.session("convert", ArchiveSource(where)) as spark:
        from lisa.pipeline.archive.writing import convert as run_job

        events = run_job(spark, where)
    done = f"{events:,} events converted: {where}"
    line = done if events else f"{where} has the present layout already"
    shared.chosen.answer({"where": where, "events": events}, line)


if __name__ == "__main__":
    run(convert)
