"""Three kinds of server for every script: embedded Valkey, redis-server, fakeredis where it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fakeredis
import pytest

from lisa.core.address import Address
from lisa.core.connection import Connection, wrap
from lisa.core.keys import Keys
from lisa.core.store import SyncStore
from tests.servers import flush

pytest.register_assert_rewrite("tests.contract.bench")

from tests.contract.bench import Bench  # noqa: E402  after the line above, which it is for

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure(config: pytest.Config) -> None:
    """Markers of these tests."""
    config.addinivalue_line("markers", "not_on_fakeredis(reason): what fakeredis lacks for it")


@pytest.fixture(params=["valkey", "redis", "fake"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An empty topic on the embedded Valkey, on redis-server, and on fakeredis where it can."""
    if request.param == "fake":
        unable = request.node.get_closest_marker("not_on_fakeredis")
        if unable is not None:
            pytest.skip(f"fakeredis: {unable.args[0]}")
        fake = fakeredis.FakeRedis(server_type="redis", version=(7,), protocol=2)
        store = SyncStore(wrap(fake), Keys())
    else:
        name = {"valkey": "valkey_server", "redis": "debian_server"}[request.param]
        url = flush(request.getfixturevalue(name).url)
        store = SyncStore(Connection(Address(url)), Keys())
    yield Bench(store)
    store.close()
