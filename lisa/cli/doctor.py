"""`lisa doctor`."""

from __future__ import annotations

import click

from lisa.cli.options import Chosen, common, pass_chosen

__all__ = ["doctor"]


@click.command()
@common
@pass_chosen
def doctor(chosen: Chosen) -> None:
    """Check whether the server is fit for a queue, and say what to change.

    Exit code 1 if a check fails; a warning alone does not.
    """
    from lisa.admin.doctor import Verdict, examine
    from lisa.cli.output import print_json, print_table

    store = chosen.store(checked=False)
    checks = store.drive(examine(store))
    ok = all(one.verdict is not Verdict.FAIL for one in checks)
    if chosen.json:
        print_json({
            "ok": ok, "server": store.where,
            "checks": [{"check": one.name, "verdict": str(one.verdict), "found": one.found,
                        "cure": one.cure or None} for one in checks],
        })  # fmt: skip
    else:
        print_table(
            ["", "check", "found", "what to change"],
            [(str(one.verdict), one.name, one.found, one.cure) for one in checks],
            title=store.where,
        )
    if not ok:
        raise click.exceptions.Exit(1)
