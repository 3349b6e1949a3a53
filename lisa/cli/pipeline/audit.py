"""`lisa pipeline audit`."""

from __future__ import annotations

from dataclasses import asdict
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
    print_messages,
    print_windows,
    topic_option,
    with_times,
)
from lisa.core.model.clock import duration_ms, human

if TYPE_CHECKING:
    from lisa.pipeline.jobs.audit import Audit


@click.command()
@archive_option()
@topic_option
@click.option("--from", "start", type=moment, metavar="ISO", help="Sent at or after this time.")
@click.option("--to", "end", type=moment, metavar="ISO", help="Sent before this time.")
@click.option("--offline", is_flag=True, help="Use only the archive; do not connect to Redis.")
@click.option(
    "--stuck-after",
    type=duration,
    default="1h",
    show_default=True,
    help="List live messages that are overdue by more than this.",
)
@click.option("--out", metavar="DIR", help="New directory for the exact lists.")
@job_options
def audit(
    shared: JobOptions,
    *,
    source: ArchiveSource,
    topics: tuple[str, ...],
    start: datetime | None,
    end: datetime | None,
    offline: bool,
    stuck_after: timedelta,
    out: str | None,
) -> None:
    """Check that no message was lost: every message sent has ended or is live.

    Exit code 1 if a message is missing.
    """
    start, end = period(start, end, until="--to")
    server = shared.server()
    with shared.session("audit", source) as spark:
        from lisa.pipeline.jobs.audit import audit as run_job

        result = run_job(
            spark,
            lambda: source.open(spark),
            None if offline else server,
            topics=topics or None,
            start=start,
            end=end,
            stuck_after=stuck_after,
            to=out,
            stage=shared.show_stage,
        )
    if shared.json:
        more = {"sent": result.sent, "proven": result.proven, "gaps": with_times(result.gaps)}
        print_json(asdict(result) | more)
    else:
        _show(result, stuck_after)
    if result.missing:
        raise click.exceptions.Exit(1)


def _show(result: Audit, stuck_after: timedelta) -> None:
    from lisa.pipeline.jobs.audit import ENDS

    print_table(
        ["topic", "sent ", *(f"{name} " for name in ENDS)],
        [
            (topic, f"{sum(counts.values()):,}", *(f"{counts.get(name, 0):,}" for name in ENDS))
            for topic, counts in sorted(result.by_topic.items())
        ],
    )
    titles = {
        "missing": "Missing: neither ended nor live",
        "stuck": f"Stuck: live, and overdue by more than {human(duration_ms(stuck_after))}",
    }
    totals = {"missing": result.missing, "stuck": result.stuck}
    for name, rows in result.first.items():
        if rows:
            print_messages(
                ["id", "topic", "state", "sent", "due"],
                rows,
                ["id", "topic", "state", "sent_ms", "due_ms"],
                total=totals[name],
                title=titles[name],
            )
    print_windows(
        ["topic", "after", "until", "reason"],
        result.gaps,
        title="Gaps in the journal: messages sent in them are unknown to the archive",
    )
    click.echo(_verdict(result))
    if result.where is not None:
        click.echo(f"lists: {result.where}")


def _verdict(result: Audit) -> str:
    if result.missing:
        return f"{result.missing:,} of {result.sent:,} messages are missing"
    how = "have ended or are live" if result.checked else "have ended or are still open"
    bound = "; messages sent in the gaps above were not checked" if result.gaps else ""
    return f"all {result.sent:,} messages {how}{bound}"


if __name__ == "__main__":
    run(audit)
