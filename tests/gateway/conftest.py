"""Fixtures for the gateway's tests: one gateway and one manager per test file.

Tests use separate topics (`new_topic`); tests that stop a server or gateway start their own.
"""

from collections.abc import Iterator

import httpx
import pytest
from redis import Redis

from lisa import Manager, Producer
from lisa.embedded import EmbeddedServer
from tests.gateway.camellia_client import Queue, queue_with_group
from tests.gateway.push_targets import Target
from tests.gateways import Gateway
from tests.servers import connect, flush


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> str:
    """URL of the embedded Valkey; emptied once for each test file."""
    return flush(valkey_server.url)


@pytest.fixture(scope="module")
def server(redis_url: str) -> Iterator[Redis]:
    """A client of that server."""
    with connect(redis_url) as client:
        yield client


@pytest.fixture(scope="module")
def manager(redis_url: str) -> Iterator[Manager]:
    """A manager on that server."""
    with Manager(redis_url) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(redis_url: str, manager: Manager) -> Iterator[Gateway]:
    """A gateway without tokens, as `lisa-gateway` starts with no configuration."""
    with Gateway(redis_url) as running:
        yield running


@pytest.fixture
def client(gateway: Gateway) -> httpx.Client:
    """A client of that gateway."""
    return gateway.client


@pytest.fixture(scope="module")
def producer(redis_url: str) -> Iterator[Producer]:
    """A native producer on the same server."""
    with Producer(redis_url) as running:
        yield running


@pytest.fixture
def queue(client: httpx.Client, redis_url: str) -> Queue:
    """A new topic of Camellia's API with a declared group."""
    return queue_with_group(client, redis_url)


@pytest.fixture
def target() -> Iterator[Target]:
    """A web hook that receives pushes."""
    with Target() as running:
        yield running
