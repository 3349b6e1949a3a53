"""The table at the end of a test session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def line(number: str, what: str, caught: str) -> str:
    """One row."""
    return f"{number:5} {what}\n      {caught}"


def print_table(reporter: pytest.TerminalReporter) -> None:
    """Print which test caught which mutant, if this session ran any."""
    reports: list[Any] = reporter.getreports("passed")
    rows = [
        value for report in reports for name, value in report.user_properties if name == "mutant"
    ]
    if rows:
        reporter.section(f"{len(rows)} mutants, each caught by the test below it")
    for row in rows:
        reporter.write_line(line(*row))
