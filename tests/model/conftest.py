"""Shows the values in failed assertions of the helpers."""

import pytest

pytest.register_assert_rewrite("tests.model.stage", "tests.model.lanes", "tests.model.coalescing")
