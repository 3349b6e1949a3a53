"""`lisa pipeline NAME`: one module per job, each a spark-submit target too."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lisa.cli.main import LazyGroup, main

__all__ = ["JOBS", "pipeline", "run"]

JOBS = {
    "schedule": "Send the rows of files or of a table.",
    "archive": "Write every transition to tables, exactly once.",
    "retain": "Delete messages that ended long ago from an archive.",
    "erase": "Delete messages and every trace of them from an archive and the journal.",
    "report": "Make a page of plots and tables from an archive.",
    "search": "Find messages in an archive and in the queue.",
    "restore": "Restore the messages of a lost server.",
    "audit": "Check that no message was lost.",
}
"""Job name -> line of help. The command of a job is the function of that name in the module of
that name in this package."""


_JOBS = {name: (f"{__name__}.{name}", line) for name, line in JOBS.items()}


@click.command(cls=LazyGroup, sections={"Commands": _JOBS})  # so that help does not import Spark
def pipeline() -> None:
    """Schedule, archive, report, search, restore and audit with Spark.

    Each job also runs on a cluster: `spark-submit .../lisa/cli/pipeline/NAME.py OPTIONS`.
    """


def run(command: click.Command) -> None:
    """Run one job as a separate program, with the exit codes and one-line errors of `lisa`."""
    # Python puts the program's directory first in sys.path: `import search` would import ours.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    main(["pipeline", str(command.name), *sys.argv[1:]], prog_name="lisa")
