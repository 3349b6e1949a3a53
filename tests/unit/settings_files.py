"""Shared by the tests of settings: files, and the errors of loading them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from lisa.core.settings import RoleSettings

Write = Callable[[str], Path]


def refusal(role: type[RoleSettings], path: Path | None, **overrides: Any) -> str:
    """The one-line error of loading a role's settings."""
    with pytest.raises(ConfigError) as caught:
        role.load(path, **overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text
