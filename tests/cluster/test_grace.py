"""After a failover, messages in flight on that node get one full ack timeout.

The ratio of failure detection to ack timeout is that of the defaults: 15 s in Redis, 10 s in Lisa.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest

from lisa import Consumer, Manager, Message, Producer
from tests import topologies
from tests.servers import open_store, wait_until
from tests.topologies import Node

pytestmark = pytest.mark.full

SILENCE = timedelta(seconds=3)
ACK_TIMEOUT = SILENCE * 10 / 15
EACH = 4
OPTIONS = {"ack_timeout": ACK_TIMEOUT, "retry_delays": [], "group": "g"}


class Slow:
    """A consumer whose handlers run until released."""

    def __init__(self, url: str, topics: Sequence[str]) -> None:
        self.may_end = threading.Event()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.attempts: set[int] = set()
        self.consumer = Consumer(url, group="g", concurrency=EACH * len(topics))
        for topic in topics:
            self.consumer.subscribe(topic, self.handle)

    def handle(self, message: Message) -> None:
        self.seen[message.topic, message.id] += 1
        self.attempts.add(message.attempt)
        assert self.may_end.wait(60)


def has_all(node: Node, replicas: Sequence[Node]) -> bool:
    """True if each replica has all data of its primary."""
    said = node.info("master_repl_offset")
    return all(one.info("slave_repl_offset") == said for one in replicas)


def outlast_a_failover(
    url: str,
    topics: Sequence[str],
    ready: Callable[[], bool],
    fail: Callable[[], set[tuple[str, str]] | None],
    *,
    is_newcomer_there: bool = True,
) -> None:
    """Handlers run on all topics: none is repeated, nothing counts as failed.

    `fail` returns what it sent.
    """
    slow = Slow(url, topics)
    with Manager(url, topics=dict.fromkeys(topics, OPTIONS)), slow.consumer:
        with Producer(url) as producer:
            sent = {(topic, producer.send(topic, n)) for topic in topics for n in range(EACH)}
        wait_until(lambda: slow.seen.keys() == sent)
        wait_until(ready)
        sent |= fail() or set()
        newcomer = Manager(url) if is_newcomer_there else nullcontext()
        with newcomer, closing(open_store(url)) as store:  # it did not see the outage
            time.sleep(2.5 * ACK_TIMEOUT.total_seconds())
            slow.may_end.set()

            def stat(topic: str, name: str) -> int:
                return store.drive(store.stats(topic)).get(f"{name}@g", 0)

            owed = Counter(topic for topic, _ in sent)
            wait_until(lambda: all(stat(one, "acked") >= owed[one] for one in topics))
            for what in ("reclaimed", "garbage", "retried"):
                assert [stat(topic, what) for topic in topics] == [0] * len(topics)
    assert slow.seen == dict.fromkeys(sent, 1)
    assert slow.attempts == {1}


def test_no_handler_runs_twice_after_a_clusters_failover(kind: str) -> None:
    """The node that is killed holds the schema."""
    with topologies.cluster(kind, replicas=1, node_timeout=SILENCE) as cluster:
        topics = [names[0] for names in topologies.topics_on(cluster, 1)]
        old = cluster.owner("lisa:schema")
        (heir,) = cluster.replicas_of(old)

        def fail() -> None:
            old.server.kill()
            wait_until(heir.is_primary)

        outlast_a_failover(cluster.url, topics, lambda: has_all(old, [heir]), fail)


def test_no_handler_runs_twice_after_sentinels_failover(kind: str, tmp_path: Path) -> None:
    with topologies.sentinels(kind, tmp_path, replicas=1, down_after=SILENCE) as made:
        old, (heir,) = made.primary, made.replicas

        def fail() -> None:
            old.stop_for_a_while()
            made.wait_for_another(old)

        outlast_a_failover(made.url, ["t"], lambda: has_all(old, [heir]), fail)


def test_no_handler_runs_twice_after_a_slots_move_that_stalled(kind: str) -> None:
    """Every node answers meanwhile, but scripts are refused: their keys are on two nodes."""
    with topologies.cluster(kind) as made:
        topics = [names[0] for names in topologies.topics_on(made, 1)]
        source, target = made.primaries[0], made.primaries[1]
        slot = topologies.slot_of(f"{{{topics[0]}}}")

        def fail() -> set[tuple[str, str]]:
            with Producer(made.url) as producer:  # due meanwhile, so the manager notices
                delays = [timedelta(seconds=0.2 * (1 + n)) for n in range(8)]
                sent = {(topics[0], producer.send(topics[0], 0, delay=delay)) for delay in delays}
            topologies.migrate(made, slot, source, target, batch=1, most=6)
            time.sleep(1.3 * ACK_TIMEOUT.total_seconds())
            topologies.migrate(made, slot, source, target)
            return sent

        # A manager that starts now could not know why leases have ended.
        outlast_a_failover(made.url, topics, lambda: True, fail, is_newcomer_there=False)
