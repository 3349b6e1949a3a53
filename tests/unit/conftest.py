"""Fixtures for the unit tests: no settings but those that a test gives."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LISA_")]:
        monkeypatch.delenv(name)
