"""`lisa pipeline erase`."""

from __future__ import annotations

from dataclasses import asdict

import click

from lisa.cli.options import key_option, whole_id
from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import (
    ArchiveSource,
    JobOptions,
    archive_option,
    job_options,
    topic_option,
)


@click.command()
@archive_option()
@topic_option
@click.option("--id", "ids", multiple=True, required=True, help="A message id; may be repeated.")
@key_option
@click.option("--offline", is_flag=True, help="Erase only from the archive; do not use Redis.")
@job_options
def erase(
    shared: JobOptions,
    *,
    source: ArchiveSource,
    topics: tuple[str, ...],
    ids: tuple[str, ...],
    key: str | None,
    offline: bool,
) -> None:
    """Delete messages and every trace of them from an archive and from the journal.

    Rewrites the files that contain them, and deletes all earlier versions. Stop `lisa pipeline
    archive` first, and cancel live messages. If the command is interrupted, run it again.

    Exit code 1 if the journal has events of these messages that are not archived yet.
    """
    server = shared.server()
    with shared.session("erase", source) as spark:
        from lisa.pipeline.jobs.deletion import erase as run_job

        done = run_job(
            spark,
            str(source.where),
            [whole_id(key, message_id) for message_id in ids],
            topics=topics or None,
            server=None if offline else server,
        )
    shared.chosen.answer(
        asdict(done) | {"seconds": round(done.seconds, 3)},
        f"{done.messages:,} messages, {done.events:,} events and {done.journal:,} journal "
        f"entries deleted ({done.seconds:,.1f} s)",
    )
    if done.unread:
        click.echo(
            f"{done.unread:,} journal entries of these messages are not archived yet: run `lisa "
            "pipeline archive --once`, then repeat this command",
            err=True,
        )
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    run(erase)
