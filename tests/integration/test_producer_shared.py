"""`lisa.send` and related functions: one producer, configured from the environment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import lisa

if TYPE_CHECKING:
    from pathlib import Path

    import redis

    from tests.servers import Processes

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    lisa.close()
    yield
    lisa.close()


@pytest.fixture
def surroundings(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    return redis_url


@pytest.mark.usefixtures("surroundings")
def test_a_whole_life() -> None:
    message_id = lisa.send("orders", {"order": 42}, delay=HOUR)
    seen = lisa.get("orders", message_id)
    assert seen is not None
    assert (seen.state, seen.body) == ("waiting", {"order": 42})
    assert lisa.reschedule("orders", message_id, delay=2 * HOUR) == "rescheduled"
    assert lisa.fire_now("orders", message_id) == "rescheduled"
    assert lisa.cancel("orders", message_id) == "cancelled"
    ids = [one.id for one in lisa.send_many("orders", ["a"], delay=HOUR)]
    ids += [one.id for one in lisa.send_stream("orders", [1, 2], delay=HOUR)]
    assert lisa.cancel_many("orders", ids) == ["cancelled"] * 3


@pytest.mark.usefixtures("surroundings")
def test_threads_get_the_same_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISA_ZONE", "UTC")
    made: list[object] = []
    from_config = lisa.Producer.from_config

    def counted() -> lisa.Producer:
        made.append(None)
        return from_config()

    monkeypatch.setattr(lisa.Producer, "from_config", counted)
    ids: list[str] = []
    threads = [
        threading.Thread(target=lambda: ids.append(lisa.send("orders", 1, delay=HOUR)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(set(ids)), len(made)) == (8, 1)


def test_the_environment_is_read_at_the_first_call(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "producer.yml"
    file.write_text(f"lisa-delay-queue: {{redis: {{url: '{redis_url}'}}, prefix: shop}}\n")
    monkeypatch.setenv("LISA_CONFIG", str(file))
    lisa.send("orders", 1, delay=HOUR)
    assert client.exists("shop:{orders}:waiting")


@pytest.mark.parametrize(
    ("variable", "loaded"),
    [("LISA_PREFIX=a", "False"), ("LISA_A_SERVICE_HOST=b", "False"), ("LISA_ZONE=UTC", "True")],
)
def test_settings_are_loaded_only_for_variables_that_need_them(
    redis_url: str, processes: Processes, variable: str, loaded: str
) -> None:
    program = "import sys, lisa; lisa.send('orders', 1); print('pydantic' in sys.modules)"
    environment = dict([variable.split("=")]) | {"LISA_REDIS_URL": redis_url}
    process = processes.start("-c", program, env=environment)
    assert process.wait() == 0, process.output
    assert process.output.splitlines()[-1] == loaded


def test_a_producer_that_is_switched_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISA_ENABLED", "false")
    with pytest.raises(lisa.ConfigError, match="enabled"):
        lisa.send("orders", 1)


def test_a_program_ends_clean(redis_url: str, client: redis.Redis, processes: Processes) -> None:
    program = "import lisa, warnings; warnings.simplefilter('error'); print(lisa.send('orders', 1))"
    process = processes.start("-X", "dev", "-c", program, env={"LISA_REDIS_URL": redis_url})
    assert process.wait() == 0
    assert client.zrange("lisa:{orders}:waiting", 0, -1) == [process.output.strip().encode()]
