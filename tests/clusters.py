"""A cluster of two nodes on loopback."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from lisa.embedded import EmbeddedServer
from lisa.embedded.server import HOST, binary, free_port
from tests.servers import connect, flush, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis


@contextmanager
def two_nodes(program: Path | None = None) -> Iterator[list[str]]:
    """The URLs of two nodes with half of the slots each; the embedded Valkey by default."""
    with ExitStack() as stack:
        nodes = []
        for first in (0, 8192):
            bus = free_port()
            extra = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
            node = stack.enter_context(EmbeddedServer(binary=program or binary(), extra=extra))
            client = stack.enter_context(connect(node.url))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, first + 8191)
            nodes.append((node, client, bus))
        (one, client, _), (other, _, bus) = nodes
        client.execute_command("CLUSTER", "MEET", HOST, other.port, bus)
        for _, client, _ in nodes:
            wait_until(partial(_is_whole, client))
        yield [one.url, other.url]


def address(nodes: list[str]) -> str:
    """Empty the nodes; returns the cluster's URL, which names one of them."""
    for url in nodes:
        flush(url)
    return nodes[0].replace("redis://", "redis+cluster://").removesuffix("/0")


def _is_whole(client: redis.Redis) -> bool:
    said = str(client.execute_command("CLUSTER INFO"))
    return "'ok'" in said and "'cluster_known_nodes': '2'" in said
