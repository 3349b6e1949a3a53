"""Fixtures for the gateway's tests: one gateway and one manager per test file.

Tests use separate topics (`new_topic`); tests that stop a server or gateway start their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lisa import Manager
from tests.gateways import Gateway

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from lisa.embedded import EmbeddedServer


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> str:
    """URL of the embedded Valkey; not emptied between tests."""
    return valkey_server.url


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
