"""Fixtures for the web page's tests: one site per file, and a headless Chromium.

Screenshots are saved in the directory LISA_SCREENSHOTS, by default build/screenshots.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from lisa import Consumer, FoundMessage, Manager, Producer
from lisa.embedded import EmbeddedServer
from tests.gateways import NO_TLS, Gateway
from tests.roles import Cast
from tests.servers import ROOT, connect

CHROMIUM = ("chromium", "chromium-browser", "google-chrome-stable")
PATIENCE_MS = 15_000
ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that drive a browser for `make test-all`."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)


@dataclass
class Site:
    """A server, a manager and a gateway whose page allows actions."""

    server: EmbeddedServer
    manager: Manager
    gateway: Gateway
    producer: Producer
    raw: redis.Redis

    @property
    def url(self) -> str:
        return self.gateway.url

    def page(self, path: str, **params: str) -> str:
        """The text of a page that must exist."""
        answer = self.gateway.client.get(path, params=params or None)
        assert answer.status_code == 200, answer.text
        return answer.text

    def option(self, topic: str, name: str, value: str) -> None:
        self.raw.hset(f"lisa:{{{topic}}}:options", name, value)

    def garbage(self, topic: str) -> list[str]:
        found: Any = self.raw.zrange(f"lisa:{{{topic}}}:g:lisa:garbage", 0, -1)
        return [one.decode() for one in found]

    def message(self, topic: str, message_id: str) -> FoundMessage:
        """A message that must exist."""
        found = self.producer.get(topic, message_id)
        assert found is not None, message_id
        return found

    def kill(self, topic: str, message_id: str, body: object, reason: str) -> None:
        """Send a message without retries, and fail it with a reason."""
        self.producer.send(topic, body, id=message_id, retry=[])
        with Consumer(self.server.url) as consumer:
            (delivery,) = consumer.pull(topic, batch=1, wait=timedelta(seconds=10))
            assert delivery.message.id == message_id
            delivery.retry(reason=reason)


@contextmanager
def running_site(*arguments: str) -> Iterator[Site]:
    with (
        EmbeddedServer(appendonly=True) as server,
        Manager(server.url) as manager,
        Producer(server.url) as producer,
        connect(server.url) as raw,
        Gateway(server.url, *arguments) as gateway,
    ):
        yield Site(server, manager, gateway, producer, raw)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A separate site for this file; its page allows actions."""
    with running_site("--allow-actions") as running:
        yield running


@pytest.fixture
def cast(redis_url: str) -> Cast:
    """The topic `orders` with its group, on another server than that of the site."""
    return Cast(redis_url, group="lisa").declare()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip("chromium is not on PATH (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield running
        running.close()


@dataclass
class Tab:
    """A browser page, with its errors and the hosts that it contacted."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def listen(self) -> Tab:
        page = self.page
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: self._said(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self.requests.append(request.url))
        return self

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith("Canvas2D"):
            self.complaints.append(f"{kind}: {text}")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, path: str) -> Any:
        """Open the path; return the response."""
        return self.page.goto(self.url + path)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def press(self, button: str, leads_to: str = "") -> None:
        """Press a button, and wait for the address to which it leads."""
        self.page.get_by_role("button", name=button).click()
        if leads_to:
            self.page.wait_for_url(f"**{leads_to}**")

    def follow(self, link: str, leads_to: str = "") -> None:
        """Follow a link, and wait for its address."""
        self.page.get_by_role("link", name=link).click()
        if leads_to:
            self.page.wait_for_url(f"**{leads_to}**")

    def until(self, condition: str, argument: object = None) -> None:
        """Wait until a JavaScript expression is true.

        Evaluated from outside: the browser's own polling evaluates a string, which the page's
        policy forbids.
        """
        ends = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(condition, argument):
            assert time.monotonic() < ends, condition
            self.page.wait_for_timeout(20)

    def violations(self) -> list[tuple[str, list[str]]]:
        """Violations found by axe: rule and place. This requires bypassing the page's policy."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        rules = {"rules": {"target-size": {"enabled": True}}}
        response = axe.run(self.page, options=rules).response
        # Of what axe leaves to people, the names of elements that have no role.
        doubts = [one for one in response["incomplete"] if one["id"] == "aria-prohibited-attr"]
        found = [*response["violations"], *doubts]
        return [(one["id"], [str(node["target"]) for node in one["nodes"]]) for one in found]

    def shot(self, name: str, *, whole: bool = False) -> Path:
        directory = Path(os.environ.get("LISA_SCREENSHOTS") or ROOT / "build" / "screenshots")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}.png"
        self.page.screenshot(path=path, full_page=whole)
        return path


@contextmanager
def new_tab(browser: Any, url: str, **options: Any) -> Iterator[Tab]:
    """A page in a context of its own, by default of 1280 by 800 pixels."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        yield Tab(context.new_page(), url).listen()
    finally:
        context.close()


@pytest.fixture
def tab(browser: Any, site: Site) -> Iterator[Tab]:
    """A new page, which must end without errors."""
    with new_tab(browser, site.url) as opened:
        yield opened
    assert opened.complaints == []


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def key_in(page: str) -> str:
    found = re.search(r'name="key" value="([0-9a-f]{64})"', page)
    assert found, page
    return found[1]


class Visitor(httpx.Client):
    """A client with a cookie jar, which sends forms as a browser does."""

    def __init__(self, url: str, **options: Any) -> None:
        headers = {"Origin": url}
        super().__init__(base_url=url, headers=headers, timeout=30.0, verify=NO_TLS, **options)

    def page(self, path: str, **params: str) -> str:
        """The text of a page that must exist."""
        answer = self.get(path, params=params or None)
        assert answer.status_code == 200, answer.text
        return answer.text

    def key(self, topic: str) -> str:
        """The key that the forms of this session need."""
        return key_in(self.get(f"/topics/{topic}").text)

    def act(self, topic: str, do: str = "", /, **fields: str) -> httpx.Response:
        """Submit a form of a topic's page."""
        form = {"key": fields.get("key") or self.key(topic), "do": do, **fields}
        return self.post(f"/topics/{topic}/act", data=form)

    def did(self, topic: str, do: str = "", /, **fields: str) -> str:
        """Submit a form; returns the address to which a successful action leads."""
        done = self.act(topic, do, **fields)
        assert done.status_code == 303, done.text
        return done.headers["location"]

    def log_in(self, token: str, path: str = "/") -> httpx.Response:
        return self.post("/login", data={"token": token, "next": path})


@pytest.fixture
def visitor(site: Site) -> Iterator[Visitor]:
    with Visitor(site.url) as visitor:
        yield visitor


TOKENS = """
tokens:
  - {name: all, token: everything-everything, scopes: [produce, consume, operate]}
  - {name: orders, token: orders-orders-orders, scopes: [produce], topics: ['orders.*']}
  - {name: sends, token: produce-produce-produce, scopes: [produce]}
  - {name: operates, token: operate-operate-operate, scopes: [operate]}
  - {name: reader, token: reader-reader-reader, scopes: [read]}
"""


@pytest.fixture(scope="module")
def guarded(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with access tokens on the site's server; its page allows actions."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.yml"
    file.write_text(TOKENS, encoding="utf-8")
    arguments = ("--tokens-file", str(file), "--allow-actions")
    with Gateway(site.server.url, *arguments) as running:
        yield running
