"""The commands `lisa`, `lisa-manager`, `lisa-consumer`, `lisa-gateway` and `lisa-relay`."""

from __future__ import annotations

import sys
from importlib import import_module

from lisa.core.model.errors import MissingExtra
from lisa.core.model.extras import requires


def run_lisa() -> None:
    """Run `lisa`."""
    _run("lisa", "lisa.cli.main", "standard")


def run_manager() -> None:
    """Run `lisa-manager`."""
    _run("lisa-manager", "lisa.cli.manager", "standard")


def run_consumer() -> None:
    """Run `lisa-consumer`."""
    _run("lisa-consumer", "lisa.cli.consumer", "standard")


def run_gateway() -> None:
    """Run `lisa-gateway`."""
    _run("lisa-gateway", "lisa.cli.gateway", "gateway")


def run_relay() -> None:
    """Run `lisa-relay`."""
    _run("lisa-relay", "lisa.cli.relay", "standard")


def _run(command: str, module: str, extra: str) -> None:
    """Run a command; if its extra is missing, print which one, and exit with code 2."""
    try:
        with requires(extra):
            main = import_module(module).main
        main()
    except MissingExtra as error:
        sys.stderr.write(f"{command}: {error}\n")
        sys.exit(2)
