"""Addresses: mistakes are reported with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lisa import Consumer, Manager, Producer
from lisa.core.daemon.status import StatusServer
from lisa.core.model.addresses import listen_address
from lisa.core.model.errors import ConfigError
from lisa.core.redis.address import Address
from lisa.core.settings import ManagerSettings

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
    "rediss+sentinel://a:0/shop",
    "redis+cluster://a:7000,[fe80::2]:7001",
    "redis+cluster://a/0",
]
BAD = {
    "localhost:6379": "'localhost:6379' is missing redis://; write redis://localhost:6379",
    "localhost": "'localhost' is missing redis://; write redis://localhost",
    "10.0.0.1:6379/3": "'10.0.0.1:6379/3' is missing redis://; write redis://10.0.0.1:6379/3",
    "me:secret@h:6379": "'h:6379' is missing redis://; write redis://h:6379",
    "http://localhost:6379": "is not a server address",
    "redis+unix:///x": "is not a server address",
    "redis+://h": "is not a server address",
    "redis://h:65536/0": "the port 65536 is not a number from 0 to 65535",
    "redis://h:port/0": "'h:port' is not host:port",
    "redis://a:1,b:2/0": "'a:1,b:2' is not host:port",
    "redis+sentinel://a,b:70000/shop": "the port 70000 is not a number from 0 to 65535",
    "redis+cluster://a:1,b:x": "'b:x' is not host:port",
    "redis://db..svc:6379": "'db..svc' is not the name of a host",
    f"redis+cluster://a,{'x' * 64}.y": "xxx.y' is not the name of a host",
    "redis://h/first": "'first' is not the number of a database",
    "redis://h/-1": "'-1' is not the number of a database",
    "redis://h/1/2": "'1/2' is not the number of a database",
    "redis+sentinel://h/shop/first": "'first' is not the number of a database",
    "redis+cluster://h/3": "a cluster has only database 0, not 3",
}


@pytest.mark.parametrize("text", ["8088", "'8088'", "127.0.0.1:8088"])
def test_a_port_alone_is_one_of_the_loopback_interface(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lisa.yml"
    path.write_text(f"lisa-delay-queue: {{http: {text}}}\n")
    assert ManagerSettings.load(path).http == "127.0.0.1:8088"
    assert ManagerSettings.load(http=text.strip("'")).http == "127.0.0.1:8088"
    with StatusServer(0, {}) as server:
        assert server.port > 0


def test_other_addresses_to_listen_on_are_kept() -> None:
    for text in ("0.0.0.0:0", "[::1]:8088", "localhost:65535"):
        assert listen_address(text) == text
    for wrong in ("localhost", ":8088", "h:", "", "h:65536", "-1", True, None, 1.5):
        with pytest.raises(ConfigError, match="write HOST:PORT"):
            listen_address(wrong)


@pytest.mark.parametrize("url", GOOD)
def test_valid_urls_are_accepted(url: str) -> None:
    Address(url)
    assert ManagerSettings.load(redis=url).redis.url == url


@pytest.mark.parametrize("url", BAD)
def test_a_mistake_is_named_by_programs_and_by_settings(url: str) -> None:
    with pytest.raises(ConfigError) as of_program:
        Address(url)
    with pytest.raises(ConfigError) as of_settings:
        ManagerSettings.load(redis=url)
    for caught in (of_program, of_settings):
        assert BAD[url] in str(caught.value)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:secret@h/0?time=5", "unknown option 'time'"),
        ("redis+sentinel://h/shop?ssl_cert_reqs=none", "'ssl_cert_reqs' needs rediss://"),
        ("redis://:secret@h?sentinel_username=me", "'sentinel_username' needs redis.sentinel://"),
        ("redis://h?retry=5", "unknown option 'retry'"),
        ("redis://h?parser_class=x", "unknown option 'parser_class'"),
        ("redis://h?decode_responses=true", "unknown option 'decode_responses'"),
    ],
)
def test_an_option_that_connections_do_not_have_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Address(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        "db=-1",
        "health_check_interval=-1",
        "max_connections=0",
        "protocol=4",
        "socket_connect_timeout=-1",
        "socket_connect_timeout=1e400",
        "socket_read_size=0",
        "ssl_cert_reqs=maybe",
        "ssl_min_version=5",
    ],
)
def test_the_value_of_an_option_is_checked(option: str) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(ConfigError, match=f"{name}='{value}' is not allowed"):
        Address(f"rediss://h?{option}")


def test_tls_files_without_a_tls_address_are_refused() -> None:
    files = {"tls_ca_file": "ca.pem"}
    with pytest.raises(ConfigError, match="need a url that begins with rediss"):
        ManagerSettings.load(redis=files | {"url": "redis://h"})
    assert ManagerSettings.load(redis=files | {"url": "rediss+cluster://h"}).redis.tls_ca_file


@pytest.mark.parametrize("given", [6379, b"redis://localhost", ["redis://localhost"]])
def test_an_address_of_another_type_is_refused(given: Any) -> None:
    for role in (Producer, Consumer, Manager):
        with pytest.raises(ConfigError, match="is not a server address: use redis://"):
            role(given)
