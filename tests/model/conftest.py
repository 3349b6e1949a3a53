"""Reports the number of cases explored at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

NOTES = pytest.StashKey[list[str]]()

pytest.register_assert_rewrite("tests.model.stage")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Add a line to be shown at the end."""
    return request.config.stash.setdefault(NOTES, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report how much was tried: a proof is only as good as its coverage."""
    lines = config.stash.get(NOTES, [])
    if lines:
        terminalreporter.section("models")
        for line in lines:
            terminalreporter.write_line(line)
