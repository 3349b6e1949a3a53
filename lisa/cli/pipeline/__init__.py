"""`lisa pipeline NAME`: one module per job, each a spark-submit target too."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

__all__ = ["JOBS", "pipeline", "run"]

JOBS = {
    "schedule": "Send the rows of files or of a table.",
    "archive": "Write every transition to tables, exactly once.",
    "convert": "Convert an archive in files that an earlier version wrote.",
    "retain": "Delete messages that ended long ago from an archive.",
    "erase": "Delete messages and every trace of them from an archive and the journal.",
    "report": "Make a page of plots and tables from an archive.",
    "search": "Find messages in an archive and in the queue.",
    "restore": "Restore the messages of a lost server.",
    "audit": "Check that no message was lost.",
    "serve": "Keep a Spark session, in which the other commands start at once.",
}
"""Job name -> line of help. The command of a job is the function of that name in the module of
that name in this package."""


class LazyCommands(click.Group):
    """A group that imports a command on first use, so that help does not import Spark."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names of all jobs, in the order of the help page."""
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the module of one job and return its command; None for an unknown name."""
        if cmd_name not in JOBS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of jobs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(JOBS.items()))


@click.command(cls=LazyCommands)
def pipeline() -> None:
    """Schedule, archive, report, search, restore and audit with Spark.

    Each job also runs on a cluster: `spark-submit .../lisa/cli/pipeline/NAME.py OPTIONS`.
    """


def run(command: click.Command) -> None:
    """Run one job as a separate program, with the exit codes and one-line errors of `lisa`."""
    # Python puts the program's directory first in sys.path: `import search` would import ours.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    from lisa.cli.main import main

    main(["pipeline", str(command.name), *sys.argv[1:]], prog_name="lisa")
