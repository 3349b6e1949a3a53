"""Shared by the tests of the judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.torture.papers import Papers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path)
