"""Fixtures for the unit tests: no settings but those that a test gives."""

from __future__ import annotations

import os
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.settings_files import Write


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LISA_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration file; returns its path."""

    def written(text: str) -> Path:
        path = tmp_path / "lisa.yml"
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return written
