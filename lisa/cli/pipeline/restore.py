"""`lisa pipeline restore`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, common, pass_chosen
from lisa.cli.pipeline.archives import Source, archive_options
from lisa.cli.pipeline.options import connection, session, spark_options
from lisa.core.shards import place_of

if TYPE_CHECKING:
    from lisa.pipeline.jobs.restore import Restoration

__all__ = ["restore"]


@click.command()
@archive_options(required=True)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option("--id", "ids", multiple=True, help="Only this message; may be repeated.")
@click.option(
    "--expire", is_flag=True, help="Put back what is past its ttl, too, without that ttl."
)
@click.option(
    "--settle-revived",
    is_flag=True,
    help="Cancel what is live again although the archive saw it end.",
)
@click.option("--dry-run", is_flag=True, help="Count and list only; nothing is changed.")
@click.option(
    "--report",
    metavar="DIR",
    help="New directory for the exact lists; by default restore-TIME in this one.",
)
@spark_options
@common
@pass_chosen
def restore(
    chosen: Chosen, *, source: Source, topics: tuple[str, ...], ids: tuple[str, ...], expire: bool,
    settle_revived: bool, dry_run: bool, report: str | None, master: str,
    spark_conf: dict[str, str],
) -> None:  # fmt: skip
    """Rebuild what a lost server held: Redis came back empty, or older.

    Every message that the archive knows and that was not settled comes back with its id, due
    time, failed attempts, ttl and policy. What the server knows is left alone, so this may be
    run twice, and while managers, consumers and producers are at work.

    Exit code 1 if something is known and could not be put back.
    """
    from lisa.cli.output import print_json

    options = connection(chosen)
    to = report or f"restore-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"[:-3]
    with session("restore", master, source.settings(spark_conf)) as spark:
        from lisa.pipeline.jobs.restore import restore as run
        from lisa.pipeline.jobs.server import Server

        result = run(
            spark, source.open(spark), Server(options["url"], options["prefix"]), to,
            topics=topics or None, ids=ids or None, expire=expire, settle_revived=settle_revived,
            dry_run=dry_run, reopen=lambda: source.open(spark), stage=stages(chosen),
        )  # fmt: skip
    if chosen.json:
        print_json(_document(result))
    else:
        _show(result)
    if result.counts["unrestorable"]:
        raise click.exceptions.Exit(1)


def stages(chosen: Chosen) -> Any:
    """Tells a person on stderr what is being done; nothing for programs."""
    return (lambda _: None) if chosen.json else lambda line: click.echo(f"{line} ...", err=True)


def _document(result: Restoration) -> dict[str, Any]:
    from dataclasses import asdict

    from lisa.cli.output import iso

    document = asdict(result)
    for window in document["possibly_lost"]:
        window |= {"after": iso(window["after_ms"]), "until": iso(window["until_ms"])}
    return document


def _show(result: Restoration) -> None:
    from lisa.cli.output import iso, print_table
    from lisa.pipeline.jobs.restore import OUTCOMES

    counts = result.counts
    names = {"restored": "would be restored" if result.dry_run else "restored"}
    print_table(
        ["messages", " ", "", ],
        [(names.get(name, name), f"{counts[name]:,}", what) for name, what in OUTCOMES.items()],
        title="Nothing was changed (dry run)" if result.dry_run else "",
    )  # fmt: skip
    for outcome, rows in result.first.items():
        more = counts[outcome] - len(rows)
        print_table(
            [names.get(outcome, outcome), "topic", "due", "attempts ", "why"],
            [(row["id"], row["topic"], iso(row["due_ms"]), row["attempts"], row["reason"])
             for row in rows] + ([(f"and {more:,} more", "", "", "", "")] if more else []),
        )  # fmt: skip
    if result.possibly_lost:
        print_table(
            ["possibly lost: topic", "accepted after", "and before", ""],
            [(place_of(one.topic, one.shard), iso(one.after_ms), iso(one.until_ms), one.reason)
             for one in result.possibly_lost],
        )  # fmt: skip
    click.echo(f"lists: {result.where} ({result.seconds:,.1f} s)")


if __name__ == "__main__":
    from lisa.cli.pipeline import run

    run(restore)
