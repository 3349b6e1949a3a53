"""`lisa fsck`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lisa.cli.options import Chosen, common, pass_chosen

if TYPE_CHECKING:
    from lisa.admin.fsck import Finding, Report

__all__ = ["fsck"]

SHOWN = 100


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option("--repair", is_flag=True, help="Mend what is wrong; no message is lost by it.")
@common
@pass_chosen
def fsck(chosen: Chosen, topics: tuple[str, ...], *, repair: bool) -> None:
    """Prove that every message stands where it should, and nowhere else, and name what does not.

    Nothing has to be stopped for it, and no step blocks the server for more than a few
    milliseconds. A message without a place becomes due now; a group whose declaration was lost is
    declared again. What cannot be repaired is told with its reason. Exit code 1 if anything is
    wrong and not repaired.
    """
    from lisa.admin.fsck import check
    from lisa.cli.output import console, print_json

    store = chosen.store()
    with console(err=True).status("") as status:

        def progress(phase: str, report: Report) -> None:
            status.update(f"{phase} ... {report.bodies:,} messages, {report.total:,} findings")

        report = store.drive(check(store, topics, repair=repair, progress=progress))
    if chosen.json:
        print_json({
            "ok": report.ok, "repair": repair, "topics": report.topics, "messages": report.bodies,
            "records": report.records, "entries": report.entries, "found": report.total,
            "repaired": report.repaired, "kinds": dict(report.kinds),
            "findings": [_fields(finding) for finding in report.findings],
        })  # fmt: skip
    else:
        _show(report, repair=repair)
    if not report.ok:
        raise click.exceptions.Exit(1)


def _fields(finding: Finding) -> dict[str, object]:
    return {
        "kind": finding.kind, "topic": finding.topic, "group": finding.group, "id": finding.id,
        "what": finding.what, "repaired": finding.repaired,
    }  # fmt: skip


def _show(report: Report, *, repair: bool) -> None:
    from lisa.admin.fsck import KINDS
    from lisa.cli.output import print_table

    if report.findings:
        print_table(
            ["finding", "topic", "group", "id", "", "repaired"],
            [(one.kind, one.topic, one.group, one.id, one.what, "yes" if one.repaired else "no")
             for one in report.findings[:SHOWN]],
        )  # fmt: skip
        if report.total > SHOWN:
            click.echo(f"... the first {SHOWN} of {report.total:,}; --json gives 10,000")
        print_table(
            ["finding", "times ", "meaning"],
            [(kind, n, KINDS[kind]) for kind, n in report.kinds.most_common()],
        )
    topics = len(report.topics)
    looked = (
        f"{topics} topic{'' if topics == 1 else 's'}, {report.bodies:,} messages, "
        f"{report.records:,} records, {report.entries:,} stream entries"
    )
    if not report.total:
        click.echo(f"{looked}: all in place")
        return
    left = report.total - report.repaired
    cure = "" if repair else "; --repair mends them"
    click.echo(f"{looked}: {report.total} wrong, {report.repaired} repaired"
               + (f", {left} left{cure}" if left else ""))  # fmt: skip
