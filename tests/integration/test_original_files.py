"""The original's three YAML files start the three roles without changes.

`configs/manager.yml`, `producer.yml` and `consumer.yml` are the examples of its page.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from lisa import Producer
from lisa.core.model.keys import Keys
from tests.servers import ROOT, Process, Processes, wait_until

CONFIGS = ROOT / "configs"
TOPICS = ("mystream", "topic2")

TWO_LINES = """
from lisa import message_received

def show(topic, *, message): print(f"{topic} got {message.body}", flush=True)
for topic in ("mystream", "topic2"): message_received.connect(show, sender=topic)
"""


@pytest.mark.parametrize(
    "first",
    [
        "manager",
        pytest.param("consumer", marks=pytest.mark.full),
        pytest.param("producer", marks=pytest.mark.full),
    ],
)
def test_three_roles_from_the_original_files(  # noqa: PLR0917  fixtures
    first: str,
    redis_url: str,
    client: redis.Redis,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every message arrives, in any order of starting."""
    (tmp_path / "shop.py").write_text(TWO_LINES)
    env = {"LISA_REDIS_URL": redis_url}
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)

    def send() -> None:
        with Producer.from_config(CONFIGS / "producer.yml") as producer:
            for topic in TOPICS:
                producer.send(topic, f"{first} now")
                producer.send(topic, f"{first} later", delay=timedelta(seconds=1))

    def start(role: str) -> None:
        if role == "producer":
            send()
        elif role == "manager":
            config = str(CONFIGS / "manager.yml")
            processes.start("-m", "lisa.cli.manager", "--config", config, env=env)
        else:
            config = str(CONFIGS / "consumer.yml")
            running.append(
                processes.start("-m", "lisa.cli.consumer", "--config", config, "shop", env=env)
            )

    running: list[Process] = []
    for role in sorted(["manager", "consumer", "producer"], key=lambda role: role != first):
        start(role)
    for number, topic in enumerate(TOPICS, 1):
        running[0].wait_for(f"{topic} got {first} now")
        running[0].wait_for(f"{topic} got {first} later")
        record, name = Keys().topic(topic).consumers, b"consumer-%d-" % number
        wait_until(partial(has_one_consumer, client, record, name))


def has_one_consumer(client: redis.Redis, record: str, name: bytes) -> bool:
    found: Any = client.hkeys(record)
    return [one.startswith(name) for one in found] == [True]
