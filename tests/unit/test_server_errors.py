"""How a server's errors are understood, also those of Redis 6.2 in scripts."""

from __future__ import annotations

import pytest
from redis import ResponseError

from lisa.core.model.errors import ServerUnavailable
from lisa.core.redis import errors
from lisa.core.redis.exchange import is_usable_after

REDIS_6_2 = "Error running script (call to f_860959fd): @user_script:276: @user_script: 276: -"


@pytest.mark.parametrize("frame", ["", REDIS_6_2])
@pytest.mark.parametrize(
    ("words", "told", "passes"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "is out of memory", False),
        ("READONLY You can't write against a read only replica.", "is a read-only replica", True),
        ("NOREPLICAS Not enough good replicas to write.", "has too few connected replicas", True),
        ("MISCONF Redis is configured to save RDB snapshots", "cannot save its data", True),
    ],
)
def test_refused_writes(frame: str, words: str, told: str, *, passes: bool) -> None:
    error = ResponseError(frame + words)
    translated = errors.translated(error, "here")
    assert isinstance(translated, ServerUnavailable)
    assert str(translated).startswith(f"here {told}")
    assert errors.passes(error) is passes
    assert errors.is_full(error) is words.startswith("OOM")
    assert is_usable_after(error) is not words.startswith("READONLY")
