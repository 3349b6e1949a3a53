"""Each topology is started once for each kind of server and module, where tests leave it whole."""

from __future__ import annotations

import pytest

from tests.servers import redis_server


@pytest.fixture(scope="module", params=["valkey", pytest.param("redis", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    """Which program the servers are. What has to do with the difference asks for both."""
    if request.param == "redis" and redis_server() is None:
        pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
    found: str = request.param
    return found
