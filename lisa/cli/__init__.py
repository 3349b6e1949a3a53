"""The command line: `lisa`, `lisa-manager`, `lisa-consumer` and `lisa-gateway`."""

from __future__ import annotations

import sys
from pathlib import Path

import lisa

# The client's distribution contains `lisa-consumer`. The other commands may be in another folder.
__path__.extend(
    str(folder)
    for folder in (Path(root, "cli") for root in lisa.__path__)
    if folder.is_dir() and str(folder) not in __path__
)


def run_consumer() -> None:
    """Run `lisa-consumer`, or say what to install."""
    try:
        from lisa.cli.consumer import main
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        install = "pip install 'lisa-delay-queue-client[settings]'"
        sys.stderr.write(f"lisa-consumer: click is not installed: {install}\n")
        sys.exit(2)
    main()
