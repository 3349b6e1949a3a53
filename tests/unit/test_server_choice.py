"""One rule for the server: the call, else the environment, else localhost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lisa import AsyncProducer, Consumer, Manager, Producer
from lisa.cli.options import Chosen
from lisa.core.model.clock import parse_zone
from lisa.core.redis.address import Address
from lisa.core.settings import ManagerSettings
from lisa.pipeline.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

GIVEN, ELSEWHERE = "redis://given:6379/0", "redis://elsewhere:6379/0"
Chooser = tuple[str, str]


def producer(url: str | None, prefix: str | None) -> Chooser:
    store = Producer(url, prefix=prefix)._store
    return store.where, store.keys.prefix


def async_producer(url: str | None, prefix: str | None) -> Chooser:
    store = AsyncProducer(url, prefix=prefix)._store
    return store.where, store.keys.prefix


def consumer(url: str | None, prefix: str | None) -> Chooser:
    address, used = Consumer(url, prefix=prefix).server
    return address.shown, used


def manager(url: str | None, prefix: str | None) -> Chooser:
    store = Manager(url, prefix=prefix)._engine.store
    return store.where, store.keys.prefix


def command(url: str | None, prefix: str | None) -> Chooser:
    address, used = Chosen(redis=url, prefix=prefix).server()
    return address.shown, used


def pipeline(url: str | None, prefix: str | None) -> Chooser:
    server = Server.of(url, prefix)
    return Address(server.url).shown, server.prefix


@pytest.mark.parametrize("choose", [producer, async_producer, consumer, manager, command, pipeline])
def test_every_role_chooses_alike(
    choose: Callable[[str | None, str | None], Chooser], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LISA_REDIS_URL", "LISA_PREFIX", "LISA_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert choose(None, None) == ("redis://localhost:6379/0", "lisa")
    monkeypatch.setenv("LISA_REDIS_URL", " ")
    assert choose(None, None) == ("redis://localhost:6379/0", "lisa")
    monkeypatch.setenv("LISA_REDIS_URL", ELSEWHERE)
    monkeypatch.setenv("LISA_PREFIX", "shop")
    assert choose(None, None) == (ELSEWHERE, "shop")
    assert choose(GIVEN, "given") == (GIVEN, "given")
    monkeypatch.setenv("LISA_REDIS__URL", "redis://section:1/0")
    assert choose(None, None) == (ELSEWHERE, "shop")
    monkeypatch.delenv("LISA_REDIS_URL")
    assert choose(None, None)[0] == "redis://section:1/0"


@pytest.mark.parametrize("section", ["redis://section:1/0", '{"url": "redis://section:1/0"}'])
def test_a_command_uses_the_settings_of_daemons(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LISA_REDIS_URL", "LISA_PREFIX", "LISA_CONFIG"):
        monkeypatch.setenv(name, " ")
    chosen = Chosen()
    monkeypatch.setenv("LISA_REDIS", section)
    assert chosen.server()[0].shown == ManagerSettings.load().redis.url == "redis://section:1/0"
    monkeypatch.delenv("LISA_REDIS")
    monkeypatch.setenv("LISA_ZONE", "UTC")
    assert chosen.server()[0].shown == "redis://localhost:6379/0"
    assert chosen.zone == parse_zone("UTC")
