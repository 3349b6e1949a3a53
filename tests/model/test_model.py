"""Random operations on several topics; after each, the server's data must match the model.

Hypothesis draws the operations, and shrinks a failure to its shortest form. By default it draws
some thousands of steps, the same each time; `LISA_MODEL_STEPS=100000 pytest tests/model` draws
that many, different each time.
"""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lisa.embedded import EmbeddedServer
from tests.model.machine import Machine

STEPS_OF_ONE_RUN = 50
STEPS = 3_000


def test_the_queue_is_as_the_model_says(valkey_server: EmbeddedServer) -> None:
    wanted = int(os.environ.get("LISA_MODEL_STEPS", "0"))
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        type("Machine", (Machine,), {"url": valkey_server.url, "seen": seen}),
        settings=settings(
            max_examples=max(1, (wanted or STEPS) // STEPS_OF_ONE_RUN),
            stateful_step_count=STEPS_OF_ONE_RUN,
            derandomize=not wanted,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    assert seen["steps"] >= 2_000
