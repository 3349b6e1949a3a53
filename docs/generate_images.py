"""Take the pictures in docs/images: `python docs/generate_images.py`. Needs Chromium.

A server with invented shops, a manager, a consumer and a gateway run while the pictures are taken.
"""

from __future__ import annotations

import os
import pty
import random
import re
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from io import StringIO
from pathlib import Path

import redis
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from lisa import Consumer, Discard, Manager, Message, Outgoing, Producer
from lisa.embedded import EmbeddedServer

IMAGES = Path(__file__).parent / "images"
MINUTE_MS = 60_000
TOPICS = {
    "orders": 2_400,
    "invoices": 310,
    "reminders": 12_500,
    "trials.ending": 45,
    "webhooks": 860,
}
"""Topics and their waiting messages."""

DESKTOP, PHONE = 1280, 390
PAGES = {
    "page-overview": ("/", DESKTOP, 760),
    "page-topic": ("/topics/orders", DESKTOP, 1_180),
}
TROUBLE = {
    "page-trouble": ("/", DESKTOP, 800),
    "page-trouble-phone": ("/", PHONE, 844),
    "page-garbage": ("/topics/webhooks/garbage", DESKTOP, 800),
}
"""Pages of the system in trouble: path, width and height."""

REASONS = ("HTTP 503 from partner.example", "HTTP 422: unknown field 'vat'", "timed out after 30 s")
COMMANDS = {"terminal-topics": "topics", "terminal-top": "top --once"}
RUN_FOR_S = 60.0

FONTS = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)
"""Fonts that rich would load from elsewhere."""


def fill(raw: redis.Redis, producer: Producer, chance: random.Random) -> None:
    """Send messages due within six hours, and write the past hours' counters."""
    now = time.time_ns() // 1_000_000
    for topic, waiting in TOPICS.items():
        counters = dict.fromkeys(["sent", "acked@lisa", "late:c@lisa", "late:e@lisa"], 0)
        for minute in range(180, 1, -1):
            handled = chance.randint(200, 300)
            counters["sent"] += handled
            counters["acked@lisa"] += handled
            counters["late:c@lisa"] += handled - handled // 20
            counters["late:e@lisa"] += handled // 20
            entry = f"{(now // MINUTE_MS - minute) * MINUTE_MS}-0"
            raw.xadd(f"lisa:{{{topic}}}:history", counters, id=entry)  # type: ignore[arg-type]
        raw.hset(f"lisa:{{{topic}}}:stats", mapping=counters)  # type: ignore[arg-type]
        delays = [min(21_600, chance.expovariate(1 / 2_700)) for _ in range(waiting)]
        producer.send_many(
            topic,
            [Outgoing({"order": n}, delay=timedelta(seconds=s)) for n, s in enumerate(delays)],
        )


def handle(message: Message) -> None:
    """A handler that gives up now and then."""
    if message.body.get("order", 0) % 50 == 0:
        raise Discard("the card has expired")


def fail(_message: Message) -> None:
    """A handler that never succeeds."""
    raise Discard(random.choice(REASONS))


def refuse(_message: Message) -> None:
    """A handler whose partner is down."""
    raise ConnectionError("mail.example refuses connections")


@contextmanager
def trouble(server: EmbeddedServer, raw: redis.Redis, producer: Producer) -> Iterator[None]:
    """Topics without a consumer, paused, with growing garbage, and with a degraded consumer."""
    fill(raw, producer, random.Random(42))
    worker = Consumer(server.url, name="worker-1")
    worker.subscribe("webhooks", fail)
    worker.subscribe("mail.welcome", refuse, retry=["1h"])
    worker.subscribe("reminders", handle)
    worker.subscribe("trials.ending", handle)
    with Manager(server.url), worker:
        for topic in ("orders", "invoices"):
            consumer = Consumer(server.url, name="worker-0")
            consumer.subscribe(topic, handle)
            with consumer:  # declares the group
                wait_until(partial(raw.exists, f"lisa:{{{topic}}}:groups"))
        raw.hset("lisa:{invoices}:options", "paused", "1")
        send_due(producer, "orders", 1_240, minutes=12)
        send_due(producer, "invoices", 86, minutes=4)
        send_due(producer, "webhooks", 51, minutes=0)
        send_due(producer, "mail.welcome", 60, minutes=0)
        wait_until(lambda: raw.zcard("lisa:{webhooks}:g:lisa:garbage") >= 51)
        wait_until(lambda: "degraded" in str(raw.hvals("lisa:{mail.welcome}:consumers")))
        yield


def send_due(producer: Producer, topic: str, count: int, *, minutes: int) -> None:
    """Send messages that have been due for so long."""
    at = datetime.now(UTC) - timedelta(minutes=minutes)
    producer.send_many(topic, [Outgoing({"order": n}, at=at) for n in range(count)])


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    while not condition():
        time.sleep(0.1)


@contextmanager
def gateway(url: str) -> Iterator[str]:
    """A gateway's address, while it runs."""
    command = [sys.executable, "-m", "lisa.cli.gateway", "--redis", url, "--port", "0"]
    with subprocess.Popen([*command, "--allow-actions"], stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None  # noqa: S101  as PIPE was given
        found = next(filter(None, (re.search(r"http://\S+/", line) for line in run.stderr)))
        yield found[0].rstrip("/")
        run.terminate()


def shoot_pages(address: str, pages: Mapping[str, tuple[str, int, int]]) -> None:
    """Take a picture of each page."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_context(color_scheme="dark").new_page()
        for name, (path, width, height) in pages.items():
            page.set_viewport_size({"width": width, "height": height})
            page.goto(address + path)
            page.wait_for_timeout(5_000)
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


def printed(words: list[str]) -> str:
    """What a command prints in a terminal of 80 columns."""
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(words, stdout=terminal, env={**env, "TERM": "xterm"}):
        os.close(terminal)
        parts = []
        with suppress(OSError):  # EIO: the command has ended
            while part := os.read(screen, 65_536):
                parts.append(part)
    os.close(screen)
    return b"".join(parts).decode().replace("\r\n", "\n")


def shoot_terminal(url: str) -> None:
    """Draw what commands print."""
    for name, command in COMMANDS.items():
        words = [sys.executable, "-m", "lisa.cli.main", *command.split(), "--redis", url]
        screen = Console(record=True, width=80, file=StringIO())
        screen.print(Text(f"$ lisa {command}"))
        screen.print(Text.from_ansi(printed(words)))
        drawn = FONTS.sub("", screen.export_svg(title="lisa"))
        (IMAGES / f"{name}.svg").write_text(drawn, encoding="utf-8")


def main() -> None:
    """Run the roles for a while, and take all pictures."""
    with (
        EmbeddedServer() as server,
        redis.Redis.from_url(server.url) as raw,
        Producer(server.url) as producer,
    ):
        fill(raw, producer, random.Random(42))
        consumer = Consumer(server.url, name="shop-1")
        for topic in TOPICS:
            consumer.subscribe(topic, handle)
        with Manager(server.url, topics=list(TOPICS)), consumer:
            ends = time.monotonic() + RUN_FOR_S
            while time.monotonic() < ends:
                producer.send("orders", {"order": random.randrange(10_000)}, delay="2s")
                time.sleep(0.1)
            with gateway(server.url) as address:
                shoot_pages(address, PAGES)
            shoot_terminal(server.url)
    with (
        EmbeddedServer() as server,
        redis.Redis.from_url(server.url) as raw,
        Producer(server.url) as producer,
        trouble(server, raw, producer),
        gateway(server.url) as address,
    ):
        shoot_pages(address, TROUBLE)


if __name__ == "__main__":
    main()
