"""`lisa pipeline NAME`: one module per job, each a spark-submit target too."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

__all__ = ["JOBS", "pipeline", "run"]

JOBS = {
    "schedule": "Send the rows of files or of a table.",
    "archive": "Keep every transition in tables, exactly once.",
    "report": "Make a page of plots and tables from an archive.",
    "search": "Find messages in archive and queue together.",
    "restore": "Rebuild what a lost server held.",
    "audit": "Prove that no message was lost.",
}
"""The jobs, each the function of its name in the module of its name here, with one line."""


class Jobs(click.Group):
    """A group whose commands are imported on use: nothing of Spark is, before a job begins."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All names, in the order of the help page."""
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one job."""
        if cmd_name not in JOBS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of jobs, from their lines above."""
        with formatter.section("Jobs"):
            formatter.write_dl(list(JOBS.items()))


@click.command(cls=Jobs)
def pipeline() -> None:
    """Schedule, archive, report, search and restore with Spark.

    Each job also runs on a cluster: `spark-submit .../lisa/cli/pipeline/NAME.py OPTIONS`.
    """


def run(command: click.Command) -> None:
    """Run one job as a program of its own, with the exit codes and one-line errors of `lisa`."""
    # Python puts the directory of a program first: nobody's `import search` is to end up here.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [place for place in sys.path if place != here]
    from lisa.cli.main import main

    main(["pipeline", str(command.name), *sys.argv[1:]], prog_name="lisa")
