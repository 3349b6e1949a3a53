"""Fixtures of the integration tests: one topic with its group, on each kind of server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import clusters
from tests.consumers import Bench
from tests.roles import Cast, Services
from tests.servers import connect
from tests.shards import Split

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis


@pytest.fixture
def cast(server: str) -> Iterator[Cast]:
    """Producer and consumer of `orders`, its group declared."""
    cast = Cast(server).declare()
    yield cast
    cast.store.close()


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    """What stands in for a manager, on one server; `orders` has its group."""
    bench = Bench(redis_url)
    bench.declare("orders")
    yield bench
    bench.store.close()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[list[str]]:
    """The nodes of a cluster, by their URLs."""
    with clusters.two_nodes() as nodes:
        yield nodes


@pytest.fixture(params=["one server", "cluster"])
def split(request: pytest.FixtureRequest) -> Iterator[Split]:
    """A topic `orders` to be split, on each kind of server."""
    if request.param == "cluster":
        url = clusters.address(request.getfixturevalue("two_nodes"))
    else:
        url = request.getfixturevalue("redis_url")
    made = Split(url)
    yield made
    made.store.close()


@pytest.fixture
def split_here(redis_url: str) -> Iterator[Split]:
    """The same on one server only, for what a cluster would not make different."""
    made = Split(redis_url)
    yield made
    made.store.close()


@pytest.fixture
def raw(server: str) -> Iterator[redis.Redis]:
    """A foreign hand on the same server."""
    with connect(server) as client:
        yield client


@pytest.fixture
def kit(cast: Cast) -> Services:
    """The manager's services over the cast's store, none of them running by itself."""
    return Services(cast)
