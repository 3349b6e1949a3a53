"""Runs one role in a forked process, with points at its calls to the server."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvloop  # noqa: F401  as the gateway does

import lisa.cli.consumer
import lisa.cli.gateway
import lisa.cli.manager
import lisa.core.settings
import lisa.gateway.serving
import lisa.manager.engine
import lisa.manager.sampler
from lisa.core.daemon import logs
from lisa.core.model.keys import keyed_id
from lisa.core.store import presence
from lisa.producer import Outgoing
from tests.faults import kill_points, kill_shop
from tests.producers import Either
from tests.scripts import all_versions

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
    lisa.cli.gateway.main(["--redis", url, "--port", str(order["port"])])


def producer(kind: str) -> Callable[[str, dict[str, Any]], None]:
    """A program that works through a list, and resumes at the first unconfirmed step."""

    def work(url: str, _: dict[str, Any]) -> None:
        ledger = os.open(CONFIRMED, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        done = CONFIRMED.read_text().count("\n")
        either = Either(kind, url)
        for name, argument, options in STEPS[kind][done:]:
            if name == "stream":
                found: Any = either.stream(TOPIC, argument, len(argument))
            else:
                found = either.ask(name, TOPIC, argument, **options)
            sent = [found] if name == "send" else []
            sent += [one.id for one in found] if name in ("send_many", "stream") else []
            assert found == WANTED.get(name, found)
            assert found is not None
            os.write(ledger, f"{' '.join(sent)}\n".encode())
        either.close()

    return work


MANY_TAKEN_BACK = ["many-taken-back-0", "many-taken-back-1"]
LATEST = keyed_id("k", "~1")
PLAIN: list[tuple[str, Any, dict[str, Any]]] = [
    ("send", "x", {"id": "soon", "delay": SOON}),
    ("send_many", [Outgoing("x", id=f"many-{n}", delay=SOON * (n % 2)) for n in range(5)], {}),
    ("send", "x", {"id": "taken-back", "delay": LATER}),
    ("cancel", "taken-back", {}),
    ("send_many", [Outgoing("x", id=one, delay=LATER) for one in MANY_TAKEN_BACK], {}),
    ("cancel_many", MANY_TAKEN_BACK, {}),
    ("send", "x", {"id": "moved", "delay": LATER}),
    ("reschedule", "moved", {"delay": SOON}),
    ("send", "x", {"id": "fired", "delay": LATER}),
    ("fire_now", "fired", {}),
    ("send", "x", {"id": "replaced", "delay": LATER}),
    ("send", "x", {"id": "replaced", "delay": SOON, "on_duplicate": "replace"}),
    ("send", "x", {}),
    ("stream", [Outgoing("x", id=f"stream-{n}") for n in range(3)], {}),
    ("get", "soon", {}),
]
WITH_KEYS: list[tuple[str, Any, dict[str, Any]]] = [
    ("send", "x", {"key": "in-order", "id": "0", "delay": SOON}),
    ("send_many", [Outgoing("x", key="in-order", id=f"{n}", delay=SOON) for n in (1, 2)], {}),
    ("send_one", "x", {"key": "debounced", "debounce": SOON}),
    ("send_one", "y", {"key": "debounced", "debounce": SOON}),
    ("send_many", [Outgoing("x", key="over", id=f"{n}", delay=LATER) for n in range(2)], {}),
    ("cancel_key", "over", {}),
    ("send", "x", {"key": "moved", "id": "0", "delay": LATER}),
    ("reschedule_key", "moved", {"shift": SOON - LATER}),
    ("send", "x", {"key": "fired", "id": "0", "delay": LATER}),
    ("fire_key", "fired", {}),
    ("send_one", "x", {"key": "k", "latest": True, "delay": LATER}),
    ("cancel", LATEST, {}),
]
"""What a program does: calls and their arguments. Each may be repeated: ids are explicit, but for
one message, which may then be sent twice."""

STEPS = {"sync": PLAIN + WITH_KEYS, "async": WITH_KEYS + PLAIN}
"""By kind of producer: most points are at the first call of a script."""

WANTED = {"cancel": "cancelled", "cancel_many": ["cancelled"] * 2}

ROLES: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "producer": producer("sync"),
    "asyncio producer": producer("async"),
    "manager": manager,
    "consumer": consumer("inline"),
    "asyncio consumer": consumer("looped"),
    "gateway": gateway,
}

list(all_versions())  # read once, for all processes that are forked
