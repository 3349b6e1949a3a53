"""The original's three YAML files start the three roles without changes.

`configs/manager.yml`, `producer.yml` and `consumer.yml` are the examples of its page.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from lisa import Producer
from lisa.core.model.keys import Keys
from tests.servers import ROOT, Processes, wait_until

CONFIGS = ROOT / "configs"
TWO_LINES = """
from lisa import message_received

def show(topic, *, message): print(f"{topic} got {message.body}", flush=True)
for topic in ("mystream", "topic2"): message_received.connect(show, sender=topic)
"""


def test_three_roles_from_the_original_files(
    client: redis.Redis,
    redis_url: str,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every message arrives, although the manager starts last."""
    (tmp_path / "shop.py").write_text(TWO_LINES)
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    env = {"LISA_REDIS_URL": redis_url}
    options = ("--config", str(CONFIGS / "consumer.yml"), "shop")
    consumer = processes.start("-m", "lisa.cli.consumer", *options, env=env)
    with Producer.from_config(CONFIGS / "producer.yml") as producer:
        for topic in ("mystream", "topic2"):
            producer.send(topic, "now")
            producer.send(topic, "later", delay="1s")
    manager = str(CONFIGS / "manager.yml")
    processes.start("-m", "lisa.cli.manager", "--config", manager, env=env)
    for number, topic in enumerate(("mystream", "topic2"), 1):
        consumer.wait_for(f"{topic} got now")
        consumer.wait_for(f"{topic} got later")

        key, expected = Keys().topic(topic).consumers, b"consumer-%d-" % number
        wait_until(partial(has_one_consumer, client, key, expected))


def has_one_consumer(client: redis.Redis, key: str, name: bytes) -> bool:
    found: Any = client.hkeys(key)
    return [one.startswith(name) for one in found] == [True]
