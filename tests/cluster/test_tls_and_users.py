"""Sentinel and Cluster with TLS, each role as a user with minimal rights."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lisa.admin import acl
from lisa.core.model.keys import Keys
from tests import certificates, topologies
from tests.certificates import Certificates
from tests.cluster.company import Company
from tests.servers import ROOT, Processes, redis_server, wait_until
from tests.topologies import Node

pytestmark = pytest.mark.skipif(
    redis_server() is None,
    reason="the embedded Valkey has no TLS, and redis-server is not on PATH",
)
ADMIN, SENTINEL_ADMIN, PASSWORD = "admin", "sentinel-admin", "s3cret"
ROLES = ("manager", "consumer", "producer")


@pytest.fixture
def tls(tmp_path: Path) -> Certificates:
    return certificates.make(tmp_path / "tls")


def page_lines(beginning: str) -> list[list[str]]:
    """Lines of the high availability page with a given start, split into words."""
    page = (ROOT / "docs" / "how-to" / "high-availability.md").read_text()
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [line.split() for line in lines if line.startswith(beginning)]
    assert found, beginning
    return found


def users(*, cluster: bool) -> list[list[str]]:
    """The commands printed by `lisa acl` for the roles."""
    commands = []
    for role in ROLES:
        rights = acl.rights_of([role], cluster=cluster, durability=True)
        options: Any = {"password": PASSWORD, "style": "setuser"}
        commands.append(acl.line(f"lisa-{role}", [role], rights, Keys(), **options).split())
    return commands


def urls(url: str, tls: Certificates, query: str = "") -> dict[str, str]:
    scheme, _, rest = url.partition("://")
    asked = f"ssl_ca_certs={quote(str(tls.authority))}{query}"
    return {role: f"{scheme}://lisa-{role}:{PASSWORD}@{rest}?{asked}" for role in ROLES}


def refused(nodes: Sequence[Node]) -> list[str]:
    """Refused commands and their users, from the servers' logs."""
    return [f"{row['username']}: {row['object']}" for node in nodes for row in node.admin.acl_log()]


def test_sentinel(tls: Certificates, processes: Processes, tmp_path: Path) -> None:
    commands = [*page_lines("ACL SETUSER"), *users(cluster=False)]
    lines = [*page_lines("sentinel auth-"), *page_lines("user lisa")]
    with topologies.sentinels(
        "redis",
        tmp_path,
        tls=tls,
        password=ADMIN,
        sentinel_password=SENTINEL_ADMIN,
        extra=["--masteruser", "replica"],
        masterauth="replica-password",
        commands=commands,
        sentinel_lines=[" ".join(line) for line in lines],
    ) as watched:
        own = "&sentinel_username=lisa&sentinel_password=lisa-password"
        company = Company(processes, tmp_path, ["orders"], urls(watched.url, tls, own))
        before = company.watch()
        old = watched.primary
        old.server.kill()
        company.is_soon_normal(before, watched.wait_for_another(old))
        company.close()
        assert refused([node for node in watched.nodes if node is not old]) == []


@pytest.mark.full
def test_cluster(tls: Certificates, processes: Processes, tmp_path: Path) -> None:
    with topologies.cluster("redis", replicas=1, spares=1, tls=tls, password=ADMIN) as made:
        for node in made.nodes:
            for command in users(cluster=True):
                node.ask(*command)
            node.ask("ACL", "LOG", "RESET")
        topics = [names[0] for names in topologies.topics_on(made, 1)]
        company = Company(processes, tmp_path, topics, urls(made.url, tls))
        slot = topologies.slot_of(f"{{{topics[1]}}}")
        topologies.migrate(made, slot, made.primaries[1], made.primaries[2], batch=20, pause_s=0.01)
        old = made.primaries[0]
        heirs = made.replicas_of(old)
        old.server.kill()
        wait_until(lambda: any(one.is_primary() for one in heirs))
        elected = time.time()  # test_cluster.py tests the lateness
        wait_until(
            lambda: {one.topic for one in company.handled() if one.due > elected} == set(topics)
        )
        company.close()
        assert refused([node for node in made.nodes if node is not old]) == []
