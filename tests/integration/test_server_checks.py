"""What roles do about an unsuitable server: refuse one that is too old, warn once of the rest."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lisa import AsyncProducer, ConfigError, Consumer, Manager, Producer, ServerUnavailable
from lisa.cli.main import main
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.store import server_checks
from lisa.embedded import EmbeddedServer
from tests import topologies
from tests.clusters import address
from tests.servers import Processes, connect, flush

TOO_OLD = "runs Redis .*, which is too old: use Redis 6.2 or newer, or Valkey"
SHOP = """
from lisa import Consumer
consumer = Consumer(group="g")
consumer.subscribe("orders", print)
"""
OUTDATED = """
from lisa.core.store import server_checks
server_checks.OLDEST = (99, 0)
from lisa.cli.{role} import main
main()
"""


@pytest.fixture(autouse=True)
def _first_contact() -> Iterator[None]:
    """This process has not seen any server."""
    server_checks._seen.clear()
    yield
    server_checks._seen.clear()


@pytest.fixture
def redis_server_url(debian_server: EmbeddedServer) -> str:
    """An empty redis-server; it has no append-only file."""
    return flush(debian_server.url)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The checks that warned, such as `persistence`."""
    return [
        one.getMessage().split(": ")[1]
        for one in caplog.records
        if one.name == server_checks.log.name and one.levelno == logging.WARNING
    ]


def produce(url: str) -> None:
    with Producer(url) as producer:
        producer.send("orders", 1)


def produce_async(url: str) -> None:
    async def send() -> None:
        async with AsyncProducer(url) as producer:
            await producer.send("orders", 1)

    asyncio.run(send())


def consume(url: str) -> None:
    consumer = Consumer(url, group="g")
    consumer.on("orders", print)
    consumer.start()
    consumer.stop()


def pull(url: str) -> None:
    with Consumer(url, group="g") as consumer:
        consumer.pull("orders")


def manage(url: str) -> None:
    Manager(url).start().stop()


ROLES = [produce, produce_async, consume, pull, manage]


# Versions


def test_a_role_refuses_an_old_server_before_it_writes(
    redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "OLDEST", (99, 0))
    for role in (*ROLES, *ROLES):  # the refusal is not forgotten
        with pytest.raises(ConfigError, match=TOO_OLD):
            role(redis_server_url)
    done = CliRunner().invoke(main, ["doctor", "--json", "--redis", redis_server_url])
    assert done.exit_code == 1
    checks = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert checks["server"]["verdict"] == "fail"
    assert checks["server"]["cure"] == "use Redis 6.2 or newer, or Valkey"
    assert "layout" not in checks
    with connect(redis_server_url) as client:
        assert client.dbsize() == 0


# Kinds of servers


def test_an_address_of_another_kind_is_refused_at_once(
    redis_server_url: str, two_nodes: list[str], tmp_path: Path
) -> None:
    """By each role, before it waits or writes, and by the doctor; whichever node is named."""
    host = redis_server_url.removeprefix("redis://").removesuffix("/0")
    with topologies.sentinels("valkey", tmp_path, replicas=0, count=1) as made:
        port = made.ports[0]
        cases = [
            *((url, "is a node of a cluster: use redis\\+cluster://") for url in two_nodes),
            (f"redis+cluster://{host}", "does not belong to a cluster: use redis://host:port"),
            (f"redis+sentinel://{host}/shop", "is no Sentinel: use redis://host:port"),
            (f"redis://127.0.0.1:{port}", "is a Sentinel: use redis\\+sentinel://"),
            (f"redis+cluster://127.0.0.1:{port}", "does not belong to a cluster"),
        ]
        for url, cure in cases:
            for role in (*ROLES, *ROLES):  # the refusal is not forgotten
                began = time.monotonic()
                with pytest.raises(ConfigError, match=cure):
                    role(url)
                assert time.monotonic() - began < PRODUCER_RETRY_TIME.total_seconds() / 2
            done = CliRunner().invoke(main, ["doctor", "--redis", url])
            assert done.exit_code not in (0, 1)
            assert re.search(cure, done.output), done.output


@pytest.mark.parametrize(
    "command",
    [
        "manager",
        pytest.param("consumer shop", marks=pytest.mark.full),
        pytest.param("gateway --port 0", marks=pytest.mark.full),
    ],
)
def test_a_daemon_refuses_an_old_server(
    redis_server_url: str, processes: Processes, tmp_path: Path, command: str
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    role, *arguments = command.split()
    program = OUTDATED.format(role=role)
    process = processes.start("-c", program, *arguments, "--redis", redis_server_url)
    assert process.wait() == 2
    assert "which is too old: use Redis 6.2 or newer" in process.output
    with connect(redis_server_url) as client:
        assert client.dbsize() == 0


def test_the_oldest_version_is_6_2() -> None:
    for version, verdict in {
        "6.0.16": "fail",
        "6.2.0": "ok",
        "10.0": "ok",
        "unknown": "ok",
    }.items():
        assert verdict_on(redis_version=version) == verdict
    assert verdict_on() == "ok"
    assert verdict_on(redis_version="5.0.0", valkey_version="9.0.0") == "ok"


def verdict_on(**info: str) -> str:
    """The verdict on the version of a server that says this of itself."""
    (version,) = [check for check in server_checks.check_server(info) if check.name == "server"]
    return version.verdict


# Warnings


@pytest.mark.parametrize("role", ROLES)
def test_a_role_warns_of_eviction_and_missing_persistence(
    redis_server_url: str,
    redis_url: str,
    role: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    role(redis_url)  # does not warn about an embedded server without persistence
    assert warnings(caplog) == []
    with connect(redis_server_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            role(redis_server_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
        assert sorted(warnings(caplog)) == ["maxmemory-policy", "persistence"]
        assert "messages may be evicted; to fix this: CONFIG SET maxmemory-policy" in caplog.text
        assert "CONFIG SET appendonly yes" in caplog.text
        for other in ROLES:
            other(redis_server_url)
        assert len(warnings(caplog)) == 2, "a process warns once"
        client.config_resetstat()
        produce(redis_server_url)
        assert "cmdstat_info" not in client.info("commandstats")


def test_a_role_warns_of_a_replica(
    own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedServer() as primary, connect(own_server.url) as client:
        client.replicaof("127.0.0.1", primary.port)
        with (
            Producer(own_server.url, patience="0s") as producer,
            pytest.raises(ServerUnavailable, match="read-only replica"),
        ):
            producer.send("orders", 1)
    assert warnings(caplog) == ["role"]


def test_a_user_without_the_right_to_info_works(
    redis_server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(redis_server_url) as client:
        client.execute_command(
            "ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+@all", "-info", "-config"
        )
        try:
            url = redis_server_url.replace("//", "//weak:pw@")
            client.execute_command("ACL", "LOG", "RESET")
            for role in (produce, produce_async, consume, pull):
                role(url)
            assert [one["count"] for one in client.acl_log()] == [1]
        finally:
            client.acl_deluser("weak")
    assert warnings(caplog) == []


@pytest.mark.full
def test_a_role_checks_the_node_of_a_cluster_that_holds_the_schema(
    two_nodes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    url = address(two_nodes)
    for node in two_nodes:
        with connect(node) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
    produce(url)
    consume(url)
    assert warnings(caplog) == ["maxmemory-policy"]
