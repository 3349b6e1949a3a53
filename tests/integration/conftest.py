"""Fixtures of the integration tests: one topic with its group, on each kind of server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.roles import Cast, Services
from tests.servers import connect

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
def raw(server: str) -> Iterator[redis.Redis]:
    """A foreign hand on the same server."""
    with connect(server) as client:
        yield client


@pytest.fixture
def kit(cast: Cast) -> Services:
    """The manager's services over the cast's store, none of them running by itself."""
    return Services(cast)
