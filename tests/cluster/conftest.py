"""Topologies are started once per kind of server and module, where tests leave them intact."""

import pytest

from tests.servers import redis_server


@pytest.fixture(scope="module", params=["valkey", pytest.param("redis", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    """The servers' program; tests that depend on the difference use both."""
    if request.param == "redis" and redis_server() is None:
        pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
    found: str = request.param
    return found
