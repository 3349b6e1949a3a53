"""Sentinel and Cluster on loopback: real servers, ended by process id with their test process.

Servers use plain connections for test control and, if certificates are given, TLS for everything
else: clients, replicas, and each other.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import redis

from lisa.embedded import EmbeddedServer
from lisa.embedded.server import HOST, binary, free_port
from tests.certificates import Certificates
from tests.servers import redis_server, wait_until

SLOTS = 16_384
SERVICE = "mymaster"
DOWN_AFTER = timedelta(seconds=2)
"""How long a server may be silent before sentinels think it is gone.

They poll once a second, and a primary that they have only just found not before that: with a
lower value they would consider it down and elect another.
"""

NODE_TIMEOUT = timedelta(milliseconds=800)
"""The same for the nodes of a cluster."""


def program(name: str) -> Path | None:
    """The server of that kind: valkey or redis; None if the latter is not installed."""
    return binary() if name == "valkey" else redis_server()


def _ask(client: redis.Redis, command: Sequence[Any]) -> Any:
    """The raw reply to one command on a new connection."""
    with client:
        client.response_callbacks.clear()
        return client.execute_command(*command)


@dataclass
class Node:
    """One server of a topology. `port` is for clients, with TLS if there are certificates."""

    server: EmbeddedServer
    port: int
    bus: int = 0
    password: str | None = None

    @property
    def admin(self) -> redis.Redis:
        """A plain client with all rights."""
        own: Any = {"port": self.server.port, "password": self.password}
        return redis.Redis(HOST, protocol=2, socket_timeout=2.0, **own)

    def ask(self, *command: Any) -> Any:
        """The raw reply to one command."""
        return _ask(self.admin, command)

    def is_primary(self) -> bool:
        """Whether it replies and reports that it is the primary."""
        try:
            return bool(self.ask("ROLE")[0] == b"master")
        except (redis.RedisError, OSError):
            return False

    def knows_as_primary(self, node_id: str) -> bool:
        """Whether another node's promotion has reached this node of a cluster."""
        lines = self.ask("CLUSTER", "NODES").decode().splitlines()
        return any(line.startswith(node_id) and "master" in line.split()[2] for line in lines)

    def info_text(self, section: str = "default") -> str:
        """A raw section of INFO; empty if the server is down."""
        try:
            return str(self.ask("INFO", section).decode())
        except (redis.RedisError, OSError):
            return ""

    def info(self, name: str) -> str:
        """One field of INFO; empty without that field, or without a server."""
        found = re.search(rf"^{name}:(.*?)\r?$", self.info_text(), re.MULTILINE)
        return found[1] if found else ""

    def stop_for_a_while(self) -> None:
        """Send SIGSTOP: requests still arrive, but get no reply."""
        os.kill(self.server.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        with suppress(ProcessLookupError):
            os.kill(self.server.pid, signal.SIGCONT)


class _Options(NamedTuple):
    """The options that all servers of a topology share."""

    name: str
    extra: Sequence[str] = ()
    tls: Certificates | None = None
    password: str | None = None
    masterauth: str | None = None


def _node(stack: ExitStack, given: _Options, *more: str, bus: int = 0) -> Node:
    options = ["--repl-diskless-sync-delay", "0"]  # 5 s by default, to gather replicas
    options += [*given.extra, *more]
    port, password = 0, given.password
    if given.tls is not None:
        port = free_port()
        options += ["--tls-port", str(port), *given.tls.server_options()]
    if password:
        options += ["--requirepass", password, "--masterauth", given.masterauth or password]
    server = stack.enter_context(EmbeddedServer(binary=program(given.name), extra=options))
    node = Node(server, port or server.port, bus, password)
    stack.callback(node.go_on)  # no process is left stopped
    return node


@dataclass
class Sentinels:
    """A primary, its replicas, and the sentinels that monitor them."""

    nodes: list[Node]
    ports: list[int]
    tls: Certificates | None = None
    password: str | None = None

    @property
    def url(self) -> str:
        scheme = "rediss" if self.tls else "redis"
        addresses = ",".join(f"{HOST}:{port}" for port in self.ports)
        return f"{scheme}+sentinel://{addresses}/{SERVICE}/0"

    @property
    def primary(self) -> Node:
        """The current primary by its own report. Of two, the one that sentinels name."""
        found = [node for node in self.nodes if node.is_primary()]
        if len(found) == 1:
            return found[0]
        port = int(self.ask(0, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])
        return next(node for node in self.nodes if node.port == port)

    @property
    def replicas(self) -> list[Node]:
        primary = self.primary
        return [node for node in self.nodes if node is not primary]

    def ask(self, index: int, *command: Any) -> Any:
        """The raw reply of a sentinel to one command."""
        own: dict[str, Any] = {"port": self.ports[index], "password": self.password}
        own |= self.tls.client_options() if self.tls else {}
        return _ask(redis.Redis(HOST, protocol=2, socket_timeout=2.0, **own), command)

    def wait_for_another(self, old: Node) -> float:
        """Wait until a node other than `old` reports that it is primary; returns that Unix time.

        It can be compared with the server's clock: all run on one machine.
        """
        others = [node for node in self.nodes if node is not old]
        wait_until(lambda: any(node.is_primary() for node in others))
        return time.time()

    def wait_until_whole(self) -> None:
        """Wait until all replicas follow the primary, and all sentinels know all the others."""
        wait_until(self._is_whole)

    def _is_whole(self) -> bool:
        replicas = len(self.nodes) - 1
        with suppress(redis.RedisError, OSError, StopIteration):
            if self.primary.info_text("replication").count("state=online") < replicas:
                return False
            for index in range(len(self.ports)):
                flat = self.ask(index, "SENTINEL", "MASTER", SERVICE)
                said = dict(zip(flat[::2], flat[1::2], strict=True))
                if (
                    int(said[b"num-slaves"]) < replicas
                    or int(said[b"num-other-sentinels"]) < len(self.ports) - 1
                    or said[b"flags"] != b"master"
                ):
                    return False
            return True
        return False


@contextmanager
def replicated(name: str) -> Iterator[tuple[Node, Node]]:
    """A primary and a replica without sentinels; they end with the block."""
    with ExitStack() as stack:
        primary, replica = (_node(stack, _Options(name)) for _ in range(2))
        replica.ask("REPLICAOF", HOST, primary.port)
        wait_until(lambda: primary.ask("INFO").count(b"state=online") == 1)
        yield primary, replica


@contextmanager
def sentinels(
    name: str,
    directory: Path,
    *,
    replicas: int = 2,
    count: int = 3,
    tls: Certificates | None = None,
    password: str | None = None,
    masterauth: str | None = None,
    extra: Sequence[str] = (),
    commands: Sequence[Sequence[str]] = (),
    sentinel_lines: Sequence[str] = (),
    sentinel_password: str | None = None,
    down_after: timedelta = DOWN_AFTER,
) -> Iterator[Sentinels]:
    """Start them all; they end with the block.

    `sentinel_lines` go into each sentinel's file; `password` is that of every server's default
    user, `sentinel_password` that of the sentinels'; `commands` are given to each server first.
    """
    with ExitStack() as stack:
        given = _Options(name, extra, tls, password, masterauth)
        nodes = [_node(stack, given) for _ in range(1 + replicas)]
        for node in nodes:
            for command in commands:
                node.ask(*command)
        for node in nodes[1:]:
            node.ask("REPLICAOF", HOST, nodes[0].port)
        made = Sentinels(
            nodes, [free_port() for _ in range(count)], tls, password=sentinel_password
        )
        for port in made.ports:
            settings = directory / f"sentinel-{port}" / "sentinel.conf"
            settings.parent.mkdir()
            lines = _sentinel_lines(made, port, settings.parent, down_after, password)
            settings.write_text("\n".join([*lines, *sentinel_lines, ""]), encoding="utf-8")
            _start_sentinel(stack, name, settings)
        made.wait_until_whole()
        yield made


def _sentinel_lines(
    made: Sentinels, port: int, here: Path, down_after: timedelta, password: str | None
) -> list[str]:
    lines = [f"bind {HOST}", f"dir {here}"]
    if made.tls is None:
        lines.append(f"port {port}")
    else:
        lines += ["port 0", f"tls-port {port}", *made.tls.config_lines()]
    quorum = len(made.ports) // 2 + 1
    silence = round(down_after.total_seconds() * 1000)
    lines += [
        f"sentinel monitor {SERVICE} {HOST} {made.nodes[0].port} {quorum}",
        f"sentinel down-after-milliseconds {SERVICE} {silence}",
        f"sentinel failover-timeout {SERVICE} {max(2_000, 4 * silence)}",
    ]
    if password:  # further lines may name another user
        lines.append(f"sentinel auth-pass {SERVICE} {password}")
    if made.password:
        lines.append(f"requirepass {made.password}")
    return lines


def _start_sentinel(stack: ExitStack, name: str, settings: Path) -> None:
    command = [str(program(name)), str(settings), "--sentinel"]
    with (settings.parent / "log").open("wb") as log:
        # They end with this process, however it ends.
        process = subprocess.Popen(
            [sys.executable, "-m", "lisa.embedded.parent_watch", "5", *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    stack.callback(process.wait, 20)
    assert process.stdin is not None
    stack.callback(process.stdin.close)


@dataclass
class Cluster:
    """Primaries with slots, and their replicas."""

    primaries: list[Node]
    replicas: list[Node]
    tls: Certificates | None = None
    start: Callable[[], Node] | None = None

    def join(self) -> Node:
        """Start a node without slots, and wait until all know it."""
        assert self.start is not None
        node = self.start()
        self.meet(node)
        self.primaries.append(node)
        self.wait_until_whole()
        return node

    def meet(self, node: Node) -> None:
        port = node.port if self.tls else node.server.port
        self.primaries[0].ask("CLUSTER", "MEET", HOST, port, node.bus)

    def forget(self, node: Node) -> None:
        """Have all other nodes forget a node, which keeps running."""
        self.primaries.remove(node)
        name = id_of(node)
        for other in self.nodes:
            other.ask("CLUSTER", "FORGET", name)

    @property
    def nodes(self) -> list[Node]:
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def owner(self, key: str) -> Node:
        """The node that owns a key's slot."""
        slot = slot_of(key)
        for node in self.nodes:
            with suppress(redis.RedisError, OSError):
                for first, last, where, *_ in node.ask("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return next(one for one in self.nodes if one.server.port == where[1])
        raise AssertionError(f"no primary owns slot {slot}")

    def replicas_of(self, primary: Node) -> list[Node]:
        return self.replicas[self.primaries.index(primary) :: len(self.primaries)]

    def wait_until_whole(self) -> None:
        """Wait until every node reports a healthy cluster."""
        for node in self.nodes:
            wait_until(partial(_is_ok, node, len(self.nodes)))
        for node in self.replicas:
            wait_until(partial(_is_following, node))


def _is_ok(node: Node, known: int) -> bool:
    with suppress(redis.RedisError, OSError):
        said = str(node.ask("CLUSTER", "INFO"))
        slots = sum(last - first + 1 for first, last, *_ in node.ask("CLUSTER", "SLOTS"))
        return (
            slots == SLOTS and "cluster_state:ok" in said and f"cluster_known_nodes:{known}" in said
        )
    return False


def _is_following(node: Node) -> bool:
    return node.is_primary() or node.info("master_link_status") == "up"


@contextmanager
def cluster(
    name: str,
    *,
    primaries: int = 3,
    replicas: int = 0,
    spares: int = 0,
    tls: Certificates | None = None,
    password: str | None = None,
    extra: Sequence[str] = (),
    node_timeout: timedelta = NODE_TIMEOUT,
) -> Iterator[Cluster]:
    """Start a cluster; `replicas` is the number per primary (0 or 1). It ends with the block.

    `spares` are further replicas, of the first primaries.
    """
    with ExitStack() as stack:
        silence = str(round(node_timeout.total_seconds() * 1000))
        own = ("--cluster-enabled", "yes", "--cluster-node-timeout", silence)
        given = _Options(name, [*own, *extra], tls, password)

        def node() -> Node:
            bus = free_port()
            return _node(stack, given, "--cluster-port", str(bus), bus=bus)

        made = Cluster(
            [node() for _ in range(primaries)],
            [node() for _ in range(primaries * replicas + spares)],
            tls,
            node,
        )
        _meet(made)
        yield made


def _meet(made: Cluster) -> None:
    count = len(made.primaries)
    for number, node in enumerate(made.nodes):
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        if number:
            made.meet(node)
    for number, node in enumerate(made.primaries):
        begin, end = SLOTS * number // count, SLOTS * (number + 1) // count - 1
        node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end)
    if made.replicas:
        for node in made.replicas:
            wait_until(partial(_knows, node, len(made.nodes)))
        for number, node in enumerate(made.replicas):
            node.ask("CLUSTER", "REPLICATE", id_of(made.primaries[number % count]))
    made.wait_until_whole()


def _knows(node: Node, nodes: int) -> bool:
    known = f"cluster_known_nodes:{nodes}" in node.ask("CLUSTER", "INFO").decode()
    return known and b"handshake" not in node.ask("CLUSTER", "NODES")


def id_of(node: Node) -> str:
    return str(node.ask("CLUSTER", "MYID").decode())


def slot_of(key: str) -> int:
    """The slot of a key, computed as servers do."""
    from redis.crc import key_slot

    return int(key_slot(key.encode()))


def slots_of(node: Node) -> list[int]:
    """The slots that a node claims."""
    rows = [row for row in node.ask("CLUSTER", "SLOTS") if row[2][1] == node.server.port]
    return [slot for first, last, *_ in rows for slot in range(first, last + 1)]


def topics_on(made: Cluster, count: int) -> list[list[str]]:
    """For each primary, the names of `count` topics whose keys it holds."""
    found: list[list[str]] = [[] for _ in made.primaries]
    numbers = itertools.count()
    while any(len(names) < count for names in found):
        name = f"t{next(numbers)}"
        found[slot_of(f"{{{name}}}") * len(made.primaries) // SLOTS].append(name)
    return [names[:count] for names in found]


def migrate(
    made: Cluster,
    slot: int,
    source: Node,
    target: Node,
    *,
    batch: int = 5,
    pause_s: float = 0.0,
    most: int | None = None,
) -> int:
    """Move a slot with all its keys while in use, as redis-cli does; returns how many keys moved.

    most: stop after this many keys, in the middle of the move.
    """
    source_id, target_id = id_of(source), id_of(target)
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    auth = ("AUTH", source.password) if source.password else ()
    moved = 0
    while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, batch):
        if most is not None and moved >= most:
            return moved
        source.ask("MIGRATE", HOST, target.port, "", 0, 5_000, *auth, "KEYS", *keys)
        moved += len(keys)
        time.sleep(pause_s)
    # The target first: were it the source, the slot would briefly have no owner.
    for node in (target, source, *made.nodes):
        with suppress(redis.RedisError):  # replicas refuse it, and a dead node does not answer
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    return moved
