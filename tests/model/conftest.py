"""Shows the values in the stage's failed assertions."""

import pytest

pytest.register_assert_rewrite("tests.model.stage")
