"""`lisa fsck`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lisa.cli.options import Chosen, common
from lisa.cli.output import console, print_json, print_table
from lisa.cli.topic_output import require_topics

if TYPE_CHECKING:
    from lisa.admin.fsck import CheckReport

SHOWN = 100


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option("--repair", is_flag=True, help="Repair the findings. No repair loses a message.")
@common
def fsck(chosen: Chosen, topics: tuple[str, ...], *, repair: bool) -> None:
    """Check that every live message is in exactly one state per group, and list inconsistencies.

    The check runs on a live system; no step blocks the server for more than a few milliseconds.
    --repair makes a message without a state due now and declares lost groups again. Findings that
    cannot be repaired are listed with a reason. Exit code 1 if an inconsistency remains, or if a
    topic is unknown.
    """
    from lisa.admin.fsck import check
    from lisa.core.model.sharding import topic_of

    store = chosen.store()
    with console(err=True).status("") as status:

        def progress(phase: str, report: CheckReport) -> None:
            status.update(f"{phase} ... {report.bodies:,} messages, {report.total:,} findings")

        report = store.drive(check(store, topics, repair=repair, progress=progress))
    if not (report.total or report.bodies):
        require_topics(store, topics)
    if chosen.json:
        print_json(
            {
                "ok": report.ok,
                "repair": repair,
                "topics": report.topics,
                "messages": report.bodies,
                "records": report.records,
                "entries": report.entries,
                "found": report.total,
                "repaired": report.repaired,
                "kinds": dict(report.kinds),
                "findings": [asdict(finding) for finding in report.findings],
            }
        )
    else:
        _show(report, repair=repair)
    damaged = {topic_of(finding.topic) for finding in report.findings}
    require_topics(store, [one for one in topics if one not in damaged])
    if not report.ok:
        raise click.exceptions.Exit(1)


def _show(report: CheckReport, *, repair: bool) -> None:
    from lisa.admin.fsck import KINDS

    if report.findings:
        print_table(
            ["finding", "topic", "group", "id", "", "repaired"],
            [
                (one.kind, one.topic, one.group, one.id, one.what, "yes" if one.repaired else "no")
                for one in report.findings[:SHOWN]
            ],
        )
        if report.total > SHOWN:
            click.echo(f"... the first {SHOWN} of {report.total:,}; --json lists up to 10,000")
        print_table(
            ["finding", "times ", "meaning"],
            [(kind, n, KINDS[kind]) for kind, n in report.kinds.most_common()],
        )
    topics = len(report.topics)
    checked = (
        f"{topics} topic{'' if topics == 1 else 's'}, {report.bodies:,} messages, "
        f"{report.records:,} records, {report.entries:,} stream entries"
    )
    if not report.total:
        click.echo(f"{checked}: no inconsistencies")
        return
    left = report.total - report.repaired
    hint = "" if repair else "; run with --repair to fix them"
    click.echo(
        f"{checked}: {report.total} inconsistent, {report.repaired} repaired"
        + (f", {left} left{hint}" if left else "")
    )
