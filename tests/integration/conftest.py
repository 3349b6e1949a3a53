"""Fixtures for the integration tests: one topic with its group, on each kind of server."""

from collections.abc import Iterator

import pytest
import redis

from lisa import Producer
from lisa.admin import groups
from lisa.core.store.store import SyncStore
from tests import clusters
from tests.consumers import Bench
from tests.producers import Topic
from tests.roles import Cast, Services
from tests.servers import connect, open_store
from tests.shards import Split


@pytest.fixture
def cast(server: str) -> Cast:
    """Producer and consumer of `orders`, with its group declared."""
    return Cast(server).declare()


@pytest.fixture
def bench(redis_url: str) -> Bench:
    """A substitute for a manager, on one server."""
    return Bench(redis_url)


@pytest.fixture
def orders_declared(bench: Bench) -> None:
    """The topic `orders` has the group `lisa`."""
    bench.declare("orders")


@pytest.fixture
def producer(redis_url: str) -> Iterator[Producer]:
    """A producer on one server."""
    with Producer(redis_url) as producer:
        yield producer


@pytest.fixture
def topic(redis_url: str) -> Topic:
    """The topic `orders` on one server."""
    return Topic(redis_url)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[list[str]]:
    """The URLs of a cluster's nodes."""
    with clusters.two_nodes() as nodes:
        yield nodes


@pytest.fixture(params=["one server", "cluster"])
def split(request: pytest.FixtureRequest) -> Split:
    """A topic `orders` to be split, on each kind of server."""
    if request.param == "cluster":
        url = clusters.address(request.getfixturevalue("two_nodes"))
    else:
        url = request.getfixturevalue("redis_url")
    return Split(url)


@pytest.fixture
def split_here(redis_url: str) -> Split:
    """The same on one server, for tests that do not depend on a cluster."""
    return Split(redis_url)


@pytest.fixture
def split_in_two_groups(split_here: Split) -> Split:
    """The same with the groups `lisa` and `audit`."""
    for group in ("lisa", "audit"):
        split_here.store.drive(groups.add(split_here.store, "orders", group))
    return split_here


@pytest.fixture
def raw(server: str) -> Iterator[redis.Redis]:
    """A plain client of the same server."""
    with connect(server) as client:
        yield client


@pytest.fixture
def store(server: str) -> SyncStore:
    """A store on the same server, where the topic `orders` is registered."""
    store = open_store(server)
    store.drive(store.register(["orders"]))
    return store


@pytest.fixture
def kit(cast: Cast) -> Services:
    """The manager's services over the cast's store, to be run step by step."""
    return Services(cast)
