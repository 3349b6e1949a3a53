"""For the unit tests: no settings but those that a test gives, and no limits of Hypothesis."""

import os

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine an example takes longer than Hypothesis expects.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LISA_")]:
        monkeypatch.delenv(name)
