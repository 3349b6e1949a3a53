"""`manage.py lisa_consumer`: runs the handlers of all apps."""

from __future__ import annotations

import os
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from lisa.core.daemon.processes import python

STANDARD = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
"""The first of the interpreter's own entries in the search path."""


class Command(BaseCommand):  # type: ignore[misc]
    """Becomes `lisa-consumer lisa.django.run`, with the same options."""

    help = (
        "Handle due messages until SIGTERM, and run enqueued tasks. Takes the options of "
        "lisa-consumer after '--', as in: manage.py lisa_consumer -- --processes 4"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Accept any options."""
        parser.add_argument("options", nargs="*", help="options of lisa-consumer")

    def handle(self, *_: Any, options: list[str], **__: Any) -> None:
        """Replace this process; manage.py has put the settings module into the environment."""
        # Other directories than the standard ones: that of manage.py, and those of --pythonpath.
        own = takewhile(lambda entry: Path(entry).name != STANDARD, sys.path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, own))
        command = python("lisa.cli.consumer", "lisa.django.run", *options)
        os.execv(sys.executable, command)  # noqa: S606  the program is this interpreter
