"""`lisa pipeline restore`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from lisa.cli.options import key_option, whole_id
from lisa.cli.output import print_json, print_table
from lisa.cli.pipeline import run
from lisa.cli.pipeline.shared import (
    ArchiveSource,
    JobOptions,
    archive_options,
    id_option,
    job_options,
    print_messages,
    print_windows,
    topic_option,
    with_times,
)

if TYPE_CHECKING:
    from lisa.pipeline.jobs.restore import Restoration


@click.command()
@archive_options("--archive", "The archive: a directory, its URL, or a JDBC URL.")
@topic_option
@id_option
@key_option
@click.option(
    "--expire", is_flag=True, help="Also restore messages past their ttl, without that ttl."
)
@click.option(
    "--settle-revived",
    is_flag=True,
    help="Cancel messages that are live although they have ended according to the archive.",
)
@click.option("--dry-run", is_flag=True, help="Only count and list; change nothing.")
@click.option(
    "--report",
    metavar="DIR",
    help="New directory for the exact lists. Default: restore-TIME in the current directory.",
)
@job_options
def restore(
    shared: JobOptions,
    *,
    source: ArchiveSource,
    topics: tuple[str, ...],
    ids: tuple[str, ...],
    key: str | None,
    report: str | None,
    **choices: bool,
) -> None:
    """Restore messages to a Redis that came back empty, or with an older state.

    Restores every archived message that was not settled, with its id, due time, failed attempts,
    ttl and policy. Messages that the server knows are not changed, so restore is idempotent and
    may run while managers, consumers and producers are running.

    Exit code 1 if an archived message could not be restored.
    """
    if key is not None and not ids:
        raise click.UsageError("--key only works with --id")
    server = shared.server()
    to = report or f"restore-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"[:-3]
    with shared.session("restore", source) as spark:
        from lisa.pipeline.jobs.restore import restore as run_job

        result = run_job(
            spark,
            source.open(spark),
            server,
            to,
            topics=topics or None,
            ids=[whole_id(key, message_id) for message_id in ids] or None,
            reopen=lambda: source.open(spark),
            stage=shared.show_stage,
            **choices,
        )
    if shared.json:
        print_json(asdict(result) | {"possibly_lost": with_times(result.possibly_lost)})
    else:
        _show(result)
    if result.counts["unrestorable"]:
        raise click.exceptions.Exit(1)


def _show(result: Restoration) -> None:
    from lisa.pipeline.jobs.restore import OUTCOMES

    counts = result.counts
    names = {"restored": "would be restored" if result.dry_run else "restored"}
    print_table(
        ["messages", " ", ""],
        [(names.get(name, name), f"{counts[name]:,}", what) for name, what in OUTCOMES.items()],
        title="Nothing was changed (dry run)" if result.dry_run else "",
    )
    for outcome, rows in result.first.items():
        print_messages(
            [names.get(outcome, outcome), "topic", "due", "attempts ", "why"],
            rows,
            ["id", "topic", "due_ms", "attempts", "reason"],
            total=counts[outcome],
        )
    print_windows(
        ["possibly lost: topic", "accepted after", "and before", ""], result.possibly_lost
    )
    click.echo(f"lists: {result.where} ({result.seconds:,.1f} s)")


if __name__ == "__main__":
    run(restore)
