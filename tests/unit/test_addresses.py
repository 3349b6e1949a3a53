"""Addresses of servers: which is used, how a mistake or an error is told, and pauses after it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import exceptions

from lisa import AsyncProducer, Consumer, Manager, Producer
from lisa.cli.options import Chosen
from lisa.core.daemon.status import StatusServer
from lisa.core.model.addresses import listen_address
from lisa.core.model.backoff import MOVING_S, Backoff, longest_after
from lisa.core.model.clock import parse_zone
from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.core.redis import errors
from lisa.core.redis.address import Address
from lisa.core.redis.flow import Patience
from lisa.core.settings import ManagerSettings
from lisa.pipeline.server import Server

GOOD = [
    "redis://localhost:6379/0",
    "redis://localhost",
    "redis://:6379/15",
    "redis:///2",
    "rediss://user:p%40ss@[::1]:6380/1?socket_timeout=2",
    "redis://h:65535/",
    "rediss://h?ssl_cert_reqs=none&client_name=shop&max_connections=9",
    "redis+sentinel://a/shop?sentinel_username=me",
    "redis://under_score.svc.",
    "unix:///run/redis.sock?db=1",
    "redis+sentinel://a,b:26380/shop/3",
    "rediss+sentinel://a:1/shop",
    "redis+cluster://a/0",
]
BAD = {
    "localhost": "'localhost' is missing redis://; write redis://localhost",
    "10.0.0.1:6379/3": "'10.0.0.1:6379/3' is missing redis://; write redis://10.0.0.1:6379/3",
    "me:secret@h:6379": "'h:6379' is missing redis://; write redis://h:6379",
    "http://localhost:6379": "is not a server address",
    "redis://:22000#secret@h:6379/0": "percent-encode the password (@ as %40",
    "redis://user:secr/secret@h:6379/0": "percent-encode the password",
    "redis://user:secr?secret@h:6379/0": "percent-encode the password",
    "redis+sentinel://u:se#cret@a,b/shop": "percent-encode the password",
    "redis+cluster://u:se/secret@a:1,b:2": "percent-encode the password",
    "unix://u:secret@run/redis.sock": "unix:// is followed by a path from the root",
    "unix://?db=1": "unix:// is followed by a path from the root",
    "redis://user:secret": "the port of 'user' is not a number",
    "redis://h x": "lacks host:port",
    "redis+sentinel://h": "names no service: end it with /NAME",
    "redis://h/1?db=2": "db is given twice",
    "redis://h?db=": "db='' is not allowed",
    "redis://h?encoding=latin-1": "encoding='latin-1' is not allowed",
    "redis://h?host=other": "unknown option 'host'",
    "redis+unix:///x": "is not a server address",
    "redis+://h": "is not a server address",
    "redis://h:0": "the port of 'h' is not a number from 1 to 65535",
    "redis://h:65536/0": "the port of 'h' is not a number from 1 to 65535",
    "redis://me:secret@h:port/0": "the port of 'h' is not a number from 1 to 65535",
    "redis://me:secret@[bad": "lacks host:port",
    "redis://a:1,b:2/0": "several hosts need redis+sentinel:// or redis+cluster://, not redis://",
    "redis+sentinel://a,b:70000/shop": "the port of 'b' is not a number from 1 to 65535",
    "redis+cluster://me:secret@a:1,b:x": "the port of 'b' is not a number from 1 to 65535",
    "redis://db..svc:6379": "'db..svc' is not the name of a host",
    f"redis+cluster://a,{'x' * 64}.y": "xxx.y' is not the name of a host",
    "redis://h/first": "'first' is not the number of a database",
    "redis://h/-1": "'-1' is not the number of a database",
    "redis://h/1/2": "'1/2' is not the number of a database",
    "redis+sentinel://me:secret@h/shop/first": "'first' is not the number of a database",
    "redis+cluster://h/3": "a cluster has only database 0, not 3",
    "redis://:secret@h/0?time=5": "unknown option 'time'",
    "redis+sentinel://h/shop?ssl_cert_reqs=none": "'ssl_cert_reqs' needs rediss://",
    "redis://:secret@h?sentinel_username=me": "'sentinel_username' needs redis+sentinel://",
    "redis://h?retry=5": "unknown option 'retry'",
    "redis://h?parser_class=x": "unknown option 'parser_class'",
    "redis://h?decode_responses=true": "unknown option 'decode_responses'",
    "rediss://h?db=-1": "db='-1' is not allowed",
    "rediss://h?health_check_interval=-1": "health_check_interval='-1' is not allowed",
    "rediss://h?max_connections=many": "max_connections='many' is not allowed",
    "rediss://h?protocol=4": "protocol='4' is not allowed",
    "rediss://h?socket_connect_timeout=1e400": "socket_connect_timeout='1e400' is not allowed",
    "rediss://h?socket_read_size=0": "socket_read_size='0' is not allowed",
    "rediss://h?ssl_cert_reqs=maybe": "ssl_cert_reqs='maybe' is not allowed",
    "rediss://h?ssl_min_version=5": "ssl_min_version='5' is not allowed",
    "redis://h?socket_timeout=0": "is not a number of seconds above 0",
    "redis://h?socket_timeout=inf": "is not a number of seconds above 0",
    "redis://h?socket_timeout=soon": "is not a number of seconds above 0",
}


def test_valid_urls_are_accepted() -> None:
    for url in GOOD:
        Address(url)
        assert ManagerSettings.load(redis=url).redis.url == url


@pytest.mark.parametrize("url", ["REDIS://h:7000/0", " redis://h:7000/0", "redis://h:7000/0\n"])
def test_case_and_blanks_around_a_url_are_of_no_account(url: str) -> None:
    for text in (url, url.replace("//", "//me:p@ss[@")):
        found = Address(text)
        assert found.shown == "redis://h:7000/0"
        assert not re.search("p@|%40", repr(found))
        assert ManagerSettings.load(redis=text).redis.url == found.url
        assert found.keywords().get("password") == ("p@ss[" if text != url else None)
        assert Producer(text)._store.connection._opened().inner.connection_kwargs["port"] == 7000


@pytest.mark.parametrize("url", BAD)
def test_a_mistake_is_named_by_programs_and_by_settings(url: str) -> None:
    uses: list[Callable[[str], object]] = [Address, lambda text: ManagerSettings.load(redis=text)]
    for use in uses:
        with pytest.raises(ConfigError) as caught:
            use(url)
        assert BAD[url] in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not re.search("secr|cret", str(caught.value))


def test_an_address_of_another_type_is_refused() -> None:
    given: Any
    for given in (6379, b"redis://:secret@localhost", ["redis://localhost"]):
        for role in (Producer, Consumer, Manager):
            with pytest.raises(ConfigError, match="is not a server address: use redis://") as said:
                role(given)
            assert "secret" not in str(said.value)


def test_tls_files_without_a_tls_address_are_refused() -> None:
    files = {"tls_ca_file": "ca.pem"}
    with pytest.raises(ConfigError, match="need a url that begins with rediss"):
        ManagerSettings.load(redis=files | {"url": "redis://h"})
    assert ManagerSettings.load(redis=files | {"url": "rediss+cluster://h"}).redis.tls_ca_file


def test_options_in_a_url_have_their_types() -> None:
    for scheme, path in (("redis+cluster", ""), ("redis+sentinel", "/shop")):
        query = "max_connections=3&socket_keepalive=false&socket_connect_timeout=2&client_name=shop"
        keywords = Address(f"{scheme}://127.0.0.1:7000{path}?{query}").keywords()
        assert (keywords["max_connections"], keywords["socket_keepalive"]) == (3, False)
        assert (keywords["socket_connect_timeout"], keywords["client_name"]) == (2.0, "shop")
    for scheme in ("redis", "redis+cluster", "redis+sentinel"):
        rest = f"{scheme}://127.0.0.1:7000/0?health_check_interval=3"
        address = Address(f"{rest}&socket_timeout=0.5")
        assert (address.url, address.socket_timeout_s) == (rest, 0.5)
        assert address.blocking_for(4).keywords()["socket_timeout"] == 6


def test_ipv6_hosts() -> None:
    several = "redis+cluster://a:7000,[fe80::2]:7001"
    assert Address(several).parts.nodes == [("a", 7000), ("fe80::2", 7001)]
    address = Address("redis+sentinel://[::1],[fe80::2]:7001/shop")
    assert address.parts.nodes == [("::1", 26379), ("fe80::2", 7001)]
    node = Address("redis+cluster://[::1]:7000").node("::1:7001")
    assert node.url == "redis://[::1]:7001/0"
    with redis.Redis.from_url(node.url) as client:
        assert client.connection_pool.connection_kwargs["host"] == "::1"


def test_addresses_to_listen_on(tmp_path: Path) -> None:
    path = tmp_path / "lisa.yml"
    for text in ("8088", "'8088'", "127.0.0.1:8088"):
        path.write_text(f"lisa-delay-queue: {{http: {text}}}\n")
        assert ManagerSettings.load(path).http == "127.0.0.1:8088"
        assert ManagerSettings.load(http=text.strip("'")).http == "127.0.0.1:8088"
    with StatusServer(0, {}) as server:
        assert server.port > 0
    for text in ("0.0.0.0:0", "[::1]:8088", "localhost:65535"):
        assert listen_address(text) == text
    for wrong in ("localhost", ":8088", "h:", "", "h:65536", "-1", True, None, 1.5):
        with pytest.raises(ConfigError, match="write HOST:PORT"):
            listen_address(wrong)


def shown(address: Address, prefix: str) -> tuple[str, str]:
    return address.shown, prefix


def of_store(store: Any) -> tuple[str, str]:
    return store.where, store.keys.prefix


def of_pipeline(url: str | None, prefix: str | None) -> tuple[str, str]:
    server = Server.of(url, prefix)
    return shown(Address(server.url), server.prefix)


CHOOSERS: dict[str, Callable[[str | None, str | None], tuple[str, str]]] = {
    "producer": lambda url, prefix: of_store(Producer(url, prefix=prefix)._store),
    "async producer": lambda url, prefix: of_store(AsyncProducer(url, prefix=prefix)._store),
    "consumer": lambda url, prefix: shown(*Consumer(url, prefix=prefix).server),
    "manager": lambda url, prefix: of_store(Manager(url, prefix=prefix)._engine.store),
    "command": lambda url, prefix: shown(*Chosen(redis=url, prefix=prefix).server()),
    "pipeline": of_pipeline,
}


@pytest.mark.parametrize("name", CHOOSERS)
def test_every_role_chooses_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the call, else that of the environment, else localhost."""
    choose, elsewhere = CHOOSERS[name], "redis://elsewhere:6379/0"
    assert choose(None, None) == ("redis://localhost:6379/0", "lisa")
    monkeypatch.setenv("LISA_REDIS_URL", " ")
    assert choose(None, None) == ("redis://localhost:6379/0", "lisa")
    monkeypatch.setenv("LISA_REDIS_URL", elsewhere)
    monkeypatch.setenv("LISA_PREFIX", "shop")
    assert choose(None, None) == (elsewhere, "shop")
    assert choose("redis://given:6379/0", "given") == ("redis://given:6379/0", "given")
    monkeypatch.setenv("LISA_REDIS__URL", "redis://section:1/0")
    assert choose(None, None) == (elsewhere, "shop")
    monkeypatch.delenv("LISA_REDIS_URL")
    assert choose(None, None)[0] == "redis://section:1/0"


@pytest.mark.parametrize("section", ["redis://section:1/0", '{"url": "redis://section:1/0"}'])
def test_commands_use_the_daemons_settings(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISA_REDIS_URL", "LISA_PREFIX", "LISA_CONFIG"):
        monkeypatch.setenv(name, " ")
    chosen = Chosen()
    monkeypatch.setenv("LISA_REDIS", section)
    assert chosen.server()[0].shown == ManagerSettings.load().redis.url == "redis://section:1/0"
    monkeypatch.delenv("LISA_REDIS")
    monkeypatch.setenv("LISA_ZONE", "UTC")
    assert chosen.server()[0].shown == "redis://localhost:6379/0"
    assert chosen.zone == parse_zone("UTC")


REDIS_6_2 = "Error running script (call to f_860959fd): @user_script:276: @user_script: 276: -"


@pytest.mark.parametrize("frame", ["", REDIS_6_2])
def test_refused_writes(frame: str) -> None:
    for words, told in (
        ("OOM command not allowed when used memory > 'maxmemory'.", "is out of memory"),
        ("READONLY You can't write against a read only replica.", "is a read-only replica"),
        ("NOREPLICAS Not enough good replicas to write.", "has too few connected replicas"),
        ("MISCONF Redis is configured to save RDB snapshots", "cannot save its data"),
    ):
        error = redis.ResponseError(frame + words)
        translated = errors.translated(error, "here")
        assert isinstance(translated, ServerUnavailable)
        assert str(translated).startswith(f"here {told}")
        is_full = words.startswith("OOM")
        assert (errors.is_full(error), errors.passes(error)) == (is_full, not is_full)
        assert errors.is_usable_after(error) is not words.startswith("READONLY")


def test_pauses_double_up_to_a_limit_and_reset_after_a_success() -> None:
    backoff = Backoff(1, 60)
    assert [backoff.take(3) for _ in range(4)] == [1, 2, 3, 3]
    assert [backoff.take() for _ in range(5)] == [6, 12, 24, 48, 60]
    backoff.reset()
    assert backoff.take() == 1
    backoff.lengthen(3)
    assert backoff.pause_s == 3


def test_the_end_of_a_slot_s_move_is_noticed_sooner_than_a_server_that_returns() -> None:
    for error, longest_s in (
        (exceptions.TryAgainError("TRYAGAIN Multiple keys request during rehashing of slot"), 0.1),
        (exceptions.ResponseError("TRYAGAIN keys are on two nodes"), 0.1),
        (exceptions.ConnectionError("refused"), 0.5),
        (exceptions.ResponseError("WRONGTYPE not a stream"), 5.0),
    ):
        assert longest_after(errors.translated(error, "redis")) == longest_s
    patience = Patience(100)
    pauses = [patience.next_pause(MOVING_S) for _ in range(10)]
    assert all(pause is not None and pause <= MOVING_S for pause in pauses)
    others = [patience.next_pause() for _ in range(10)]
    assert max(pause for pause in others if pause) > MOVING_S
