"""A cluster of two nodes on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from tests import topologies
from tests.servers import flush

PATIENT = timedelta(minutes=2)
"""A node stays a member, however long a test lets it hang."""


@contextmanager
def two_nodes(program: Path | None = None) -> Iterator[list[str]]:
    """The URLs of two nodes with half of the slots each; the embedded Valkey by default."""
    name = "valkey" if program in (None, topologies.program("valkey")) else "redis"
    with topologies.cluster(name, primaries=2, node_timeout=PATIENT) as made:
        yield [node.server.url for node in made.primaries]


def address(nodes: list[str]) -> str:
    """Empty the nodes; returns the cluster's URL, which names one of them."""
    for url in nodes:
        flush(url)
    return nodes[0].replace("redis://", "redis+cluster://").removesuffix("/0")
