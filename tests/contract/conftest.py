"""Runs every script on three servers: embedded Valkey, redis-server, and fakeredis if possible."""

from collections.abc import Iterator

import fakeredis
import pytest

from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.pools import Pool
from lisa.core.store.store import SyncStore
from lisa.core.transitions import loader
from tests.servers import flush

pytest.register_assert_rewrite("tests.contract.bench")

from tests.contract.bench import Bench  # noqa: E402  after the line above, which it is for


def pytest_configure(config: pytest.Config) -> None:
    """Markers of these tests."""
    config.addinivalue_line("markers", "not_on_fakeredis(reason): what fakeredis lacks for it")


load = loader.load


def load_whole(name: str, _features: loader.Features = loader.NONE) -> loader.Script:
    """A script with the code of all features, which must change no result."""
    return load(name, loader.features_of(name))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on each server, and plain if the module calls a script with code for features."""
    asked = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "bench" not in metafunc.fixturenames or "bench" in asked:
        return
    calls = {getattr(value, "script", "") for value in vars(metafunc.module).values()}
    in_parts = {name for name in loader.names() if loader.features_of(name)}
    is_in_parts = calls & in_parts or {"item", "CASES"} & set(vars(metafunc.module))
    others = ["redis", "fake"]
    if metafunc.definition.get_closest_marker("not_on_fakeredis"):
        others.remove("fake")
    full = [pytest.param(name, marks=pytest.mark.full) for name in others]
    plain = ["plain"] if is_in_parts else []
    metafunc.parametrize("bench", ["valkey", *plain, *full], indirect=True)


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """An empty topic on the embedded Valkey, on redis-server, or on fakeredis.

    "plain" is the embedded Valkey, too: there and on redis-server scripts have only the code of the
    features in use, as in production; elsewhere that of all features. `test_every_script` runs
    every script on all of these at each level.
    """
    if request.param in ("valkey", "fake"):
        monkeypatch.setattr(loader, "load", load_whole)
    if request.param == "fake":
        fake = fakeredis.FakeRedis(server_type="redis", version=(7,), protocol=2)
        connection = Connection(Address())
        connection._link = Pool(fake.connection_pool)
        store = SyncStore(connection, Keys())
    else:
        name = "debian_server" if request.param == "redis" else "valkey_server"
        url = flush(request.getfixturevalue(name).url)
        store = SyncStore(Connection(Address(url)), Keys())
    yield Bench(store)
    store.close()
