"""`lisa doctor`."""

from __future__ import annotations

import click

from lisa.cli.options import Chosen, common
from lisa.cli.output import print_json, print_table


@click.command()
@common
def doctor(chosen: Chosen) -> None:
    """Check whether the server is configured for a queue, and suggest fixes.

    Exit code 1 if a check fails; warnings do not count.
    """
    from lisa.admin.doctor import examine
    from lisa.core.store.server_checks import CheckResult

    store = chosen.store(checked=False)
    checks = store.drive(examine(store))
    ok = all(one.verdict is not CheckResult.FAIL for one in checks)
    if chosen.json:
        print_json(
            {
                "ok": ok,
                "server": store.where,
                "checks": [
                    {
                        "check": one.name,
                        "verdict": str(one.verdict),
                        "found": one.found,
                        "cure": one.cure or None,
                    }
                    for one in checks
                ],
            }
        )
    else:
        print_table(
            ["", "check", "found", "what to change"],
            [(str(one.verdict), one.name, one.found, one.cure) for one in checks],
            title=store.where,
        )
    if not ok:
        raise click.exceptions.Exit(1)
