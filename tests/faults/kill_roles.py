"""Runs one role in a forked process, with points at its calls to the server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvloop  # noqa: F401  as the gateway does

import lisa.cli.consumer
import lisa.cli.gateway
import lisa.cli.manager
import lisa.consumer
import lisa.core.settings
import lisa.gateway.serving
import lisa.manager.engine
import lisa.manager.sampler
from lisa.cli import modules, rights  # noqa: F401  as the daemons do
from lisa.core.daemon import logs
from lisa.core.store import presence
from lisa.core.transitions import loader
from lisa.core.transitions.cancel import Cancelled
from lisa.producer import Outgoing
from tests.faults import kill_points, kill_shop
from tests.producers import Either

CONFIRMED = Path("confirmed")
TOPIC = kill_shop.TOPIC
LATER = timedelta(minutes=10)
SOON = timedelta(milliseconds=100)


def run(order: dict[str, Any]) -> None:
    """Run `order["role"]` on `order["url"]`, with points written to `order["points"]`."""
    logs.configure("text", "info")
    presence.BEAT = timedelta(seconds=0.3)
    at = order["kill_at"]
    kill_points.install(kill_points.Point.of(at) if at else None, Path(order["points"]))
    ROLES[order["role"]](order["url"], order)


def manager(url: str, order: dict[str, Any]) -> None:
    """`lisa-manager`, with tasks of a minute or longer run each second."""
    engine: Any = lisa.manager.engine
    engine.PRUNE = engine.REFRESH = timedelta(seconds=0.3)
    engine.SAMPLE = "0/1 * * * * ?"
    sampler: Any = lisa.manager.sampler
    sampler.HOUR_MS = sampler.MINUTE_MS  # so that each minute includes the thinning of full hours
    presence.GONE_AFTER_MS = 500
    lisa.cli.manager.main(["--redis", url, "--config", order["config"]])


def consumer(name: str) -> Callable[[str, dict[str, Any]], None]:
    """`lisa-consumer` with one of the shop's consumers."""
    target = f"{kill_shop.__name__}:{name}"

    def work(url: str, _: dict[str, Any]) -> None:
        kill_shop.close_windows_early()
        lisa.cli.consumer.main(["--redis", url, target])

    return work


def gateway(url: str, order: dict[str, Any]) -> None:
    """`lisa-gateway` on the given port."""
    lisa.cli.gateway.main(["--redis", url, "--port", str(order["port"])])


def puller(url: str, _: dict[str, Any]) -> None:
    """A program with a loop around `consumer.pull`, which performs each operation once."""
    import signal

    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    print("pulling", flush=True)  # noqa: T201  from now on it heeds signals
    released: set[str] = set()
    with lisa.consumer.Consumer(url) as consumer:
        while not stopped:
            for delivery in consumer.pull(TOPIC, batch=2, wait=timedelta(seconds=1)):
                body = delivery.body
                if body == "again" and delivery.id not in released:
                    released.add(delivery.id)
                    delivery.release()
                    continue
                kill_shop.note(delivery.message)
                if body == "fails" and delivery.attempt == 1:
                    delivery.retry(delay=timedelta(milliseconds=50))
                elif body == "given-up":
                    delivery.discard()
                else:
                    if isinstance(body, int):
                        delivery.extend()
                    delivery.ack()


def producer(kind: str) -> Callable[[str, dict[str, Any]], None]:
    """A program that works through a list, and resumes at the first unconfirmed step."""

    def work(url: str, _: dict[str, Any]) -> None:
        done = CONFIRMED.read_text().splitlines() if CONFIRMED.exists() else []
        steps = {str(json.loads(line)["step"]) for line in done}
        ledger = os.open(CONFIRMED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        either = Either(kind, url)
        for number, step in enumerate(STEPS):
            if str(number) not in steps:
                line = {"step": number, **step(either)}
                os.write(ledger, json.dumps(line).encode() + b"\n")
        either.close()

    return work


def _send(either: Either, *, message_id: str | None, **options: Any) -> dict[str, Any]:
    return {"sent": [either.send(TOPIC, "x", id=message_id, **options)]}


def _send_many(either: Either) -> dict[str, Any]:
    several = [Outgoing("x", id=f"many-{n}", delay=SOON * (n % 2)) for n in range(5)]
    return {"sent": [one.id for one in either.send_many(TOPIC, several)]}


def _stream(either: Either) -> dict[str, Any]:
    several = [Outgoing("x", id=f"stream-{n}") for n in range(3)]
    return {"sent": [one.id for one in either.stream(TOPIC, several, 3)]}


def _cancel(either: Either) -> dict[str, Any]:
    outcome = either.ask("cancel", TOPIC, "taken-back")
    assert outcome is Cancelled.CANCELLED, outcome
    return {"cancelled": ["taken-back"]}


def _cancel_many(either: Either) -> dict[str, Any]:
    ids = ["many-taken-back-0", "many-taken-back-1"]
    assert either.ask("cancel_many", TOPIC, ids) == [Cancelled.CANCELLED] * 2
    return {"cancelled": ids}


def _moved(either: Either) -> dict[str, Any]:
    return {"said": either.ask("reschedule", TOPIC, "moved", delay=SOON)}


def _fired(either: Either) -> dict[str, Any]:
    return {"said": either.ask("fire_now", TOPIC, "fired")}


def _looked(either: Either) -> dict[str, Any]:
    found = either.ask("get", TOPIC, "soon")
    assert found is not None
    return {"said": found.state}


STEPS: tuple[Callable[[Either], dict[str, Any]], ...] = (
    lambda one: _send(one, message_id="soon", delay=SOON),
    _send_many,
    lambda one: _send(one, message_id="taken-back", delay=LATER),
    _cancel,
    lambda one: {
        "sent": [one.send(TOPIC, "x", id=f"many-taken-back-{n}", delay=LATER) for n in range(2)]
    },
    _cancel_many,
    lambda one: _send(one, message_id="moved", delay=LATER),
    _moved,
    lambda one: _send(one, message_id="fired", delay=LATER),
    _fired,
    lambda one: _send(one, message_id="replaced", delay=LATER),
    lambda one: _send(one, message_id="replaced", delay=SOON, on_duplicate="replace"),
    lambda one: _send(one, message_id=None),
    _stream,
    _looked,
)
"""Each may be done again: ids are its own, but for one message, which may then be sent twice."""

ROLES: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "producer": producer("sync"),
    "asyncio producer": producer("async"),
    "manager": manager,
    "consumer": consumer("inline"),
    "asyncio consumer": consumer("looped"),
    "consumer.pull": puller,
    "gateway": gateway,
}

for _name in loader.names():  # read once, for all processes that are forked
    loader.load(_name)
