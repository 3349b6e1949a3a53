"""`lisa pipeline audit`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, Duration, Moment, common, pass_chosen
from lisa.cli.pipeline.archives import Source, archive_options
from lisa.cli.pipeline.options import connection, session, spark_options
from lisa.core.shards import place_of

if TYPE_CHECKING:
    from lisa.pipeline.jobs.audit import Audit

__all__ = ["audit"]


@click.command()
@archive_options(required=True)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option("--from", "start", type=Moment(), metavar="ISO", help="Sent at or after this time.")
@click.option("--to", "end", type=Moment(), metavar="ISO", help="Sent before this time.")
@click.option("--offline", is_flag=True, help="Judge by the archive alone; ask no server.")
@click.option(
    "--stuck-after",
    type=Duration(),
    default="1h",
    show_default=True,
    help="List what is live and overdue by more than this.",
)
@click.option("--out", metavar="DIR", help="New directory for the exact lists.")
@spark_options
@common
@pass_chosen
def audit(
    chosen: Chosen, *, source: Source, topics: tuple[str, ...], start: datetime | None,
    end: datetime | None, offline: bool, stuck_after: timedelta, out: str | None, master: str,
    spark_conf: dict[str, str],
) -> None:  # fmt: skip
    """Prove that no message was lost: each that was sent reached an end, or is live.

    Exit code 1 if one is missing.
    """
    from lisa.cli.output import print_json
    from lisa.cli.pipeline.restore import stages
    from lisa.cli.pipeline.search import aware

    start, end = aware("--from", start), aware("--to", end)
    if start is not None and end is not None and start >= end:
        raise click.UsageError("--from lies behind --to")
    options = connection(chosen)
    with session("audit", master, source.settings(spark_conf)) as spark:
        from lisa.pipeline.jobs.audit import audit as run
        from lisa.pipeline.jobs.server import Server

        server = None if offline else Server(options["url"], options["prefix"])
        result = run(
            spark, lambda: source.open(spark), server,
            topics=topics or None, start=start, end=end, stuck_after=stuck_after, to=out,
            stage=stages(chosen),
        )  # fmt: skip
    if chosen.json:
        print_json(_document(result))
    else:
        _show(result, stuck_after)
    if result.missing:
        raise click.exceptions.Exit(1)


def _document(result: Audit) -> dict[str, Any]:
    from dataclasses import asdict

    from lisa.cli.output import iso

    document = asdict(result) | {"sent": result.sent, "proven": result.proven}
    for gap in document["gaps"]:
        gap |= {"after": iso(gap["after_ms"]), "until": iso(gap["until_ms"])}
    return document


def _show(result: Audit, stuck_after: timedelta) -> None:
    from lisa.cli.output import iso, print_table
    from lisa.core.clock import duration_ms, human
    from lisa.pipeline.jobs.audit import ENDS

    print_table(
        ["topic", "sent ", *(f"{name} " for name in ENDS)],
        [(topic, f"{sum(counts.values()):,}", *(f"{counts.get(name, 0):,}" for name in ENDS))
         for topic, counts in sorted(result.by_topic.items())],
    )  # fmt: skip
    titles = {
        "missing": "Missing: neither ended nor live",
        "stuck": f"Stuck: live, and overdue by more than {human(duration_ms(stuck_after))}",
    }
    for name, rows in result.first.items():
        if not rows:
            continue
        more = (result.missing if name == "missing" else result.stuck) - len(rows)
        print_table(
            ["id", "topic", "state", "sent", "due"],
            [(row["id"], row["topic"], row["state"], iso(row["sent_ms"]), iso(row["due_ms"]))
             for row in rows] + ([(f"and {more:,} more", "", "", "", "")] if more else []),
            title=titles[name],
        )  # fmt: skip
    if result.gaps:
        print_table(
            ["topic", "after", "until", "what is gone"],
            [(place_of(gap.topic, gap.shard), iso(gap.after_ms), iso(gap.until_ms), gap.reason)
             for gap in result.gaps],
            title="Gaps of the journal: what was sent in them is not known here",
        )  # fmt: skip
    click.echo(_verdict(result))
    if result.where is not None:
        click.echo(f"lists: {result.where}")


def _verdict(result: Audit) -> str:
    if result.missing:
        return f"{result.missing:,} of {result.sent:,} messages are missing"
    how = "reached an end or is live" if result.checked else "reached an end, or none is known yet"
    bound = "; the proof is bounded by the gaps above" if result.gaps else ""
    return f"each of {result.sent:,} messages {how}{bound}"


if __name__ == "__main__":
    from lisa.cli.pipeline import run

    run(audit)
