"""Shows the values in the stage's failed assertions."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.model.stage")
