"""The pytest plugin, loaded through the entry point `pytest11`; imports Lisa at first use."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lisa.testing import AsyncLisaTestKit, ClockedServer, LisaTestKit


def pytest_configure(config: pytest.Config) -> None:
    """Register `async_lisa` with the plugin that runs the event loop of asynchronous tests."""
    runner: Any = config.pluginmanager.get_plugin("asyncio")  # pytest-asyncio; anyio needs nothing
    fixture: Callable[..., Any] = pytest.fixture if runner is None else runner.fixture
    made = ModuleType("lisa-async-fixtures")
    vars(made)["async_lisa"] = fixture(_async_lisa, name="async_lisa")
    config.pluginmanager.register(made, made.__name__)


@pytest.fixture(scope="session")
def lisa_server() -> Iterator[ClockedServer]:
    """The server of this session, started at first use. Tests use it one after the other."""
    from lisa.testing import ClockedServer

    server = ClockedServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def lisa(lisa_server: ClockedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[LisaTestKit]:
    """A `lisa.testing.LisaTestKit`; `lisa.send` and roles without a URL use its server too."""
    from lisa.testing import LisaTestKit

    with _chosen(lisa_server, monkeypatch), LisaTestKit(lisa_server) as kit:
        yield kit


async def _async_lisa(
    lisa_server: ClockedServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncLisaTestKit]:
    """A `lisa.testing.AsyncLisaTestKit`."""
    from lisa.testing import AsyncLisaTestKit

    with _chosen(lisa_server, monkeypatch):
        async with AsyncLisaTestKit(lisa_server) as kit:
            yield kit


@contextmanager
def _chosen(server: ClockedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let roles without a URL use this server, even if the environment configures another."""
    from lisa.core.model.keys import Keys
    from lisa.producer.producer import close

    close()
    for name in list(os.environ):
        if name == "LISA_REDIS" or name.startswith("LISA_REDIS__"):  # another server's credentials
            monkeypatch.delenv(name)
    monkeypatch.setenv("LISA_REDIS_URL", server.url)
    if {"LISA_CONFIG", "LISA_DURABILITY"} & os.environ.keys():
        monkeypatch.setenv("LISA_DURABILITY", "none")  # this server has no replicas
    monkeypatch.setenv("LISA_PREFIX", Keys.of(None).prefix)
    try:
        yield
    finally:
        close()
