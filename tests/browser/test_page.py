"""The page in a browser: layout, live updates and accessibility."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Consumer, Outgoing
from tests.browser.conftest import Site, Tab, now_ms, running_site, waiting
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>alert(1)</script>"
HOSTILE_ID = "\"><svg onload=alert(1)>'/../x?y=1#z%41"
NAMES = (
    "billing.retry",
    "carts.abandoned",
    "invoices",
    "mail.reminder",
    "mail.welcome",
    "orders",
    "reports.nightly",
    "search.reindex",
    "sms",
    "stock.release",
    "trials.ending",
    "webhooks",
)
PAGES = {
    "overview": "/",
    "topic": "/topics/orders",
    "days": "/topics/orders?ahead=days&past=week",
    "garbage": "/topics/orders/garbage",
    "messages": "/topics/orders/messages?state=waiting",
    "dead": "/topics/orders/messages?state=garbage",
    "message": "/topics/orders/messages/dead-order",
    "waiting": "/topics/orders/messages/order-1",
    "schedules": "/topics/reports.nightly/schedules",
    "schedule": "/topics/reports.nightly/schedule?name=nightly",
    "schedule-form": "/topics/reports.nightly/schedule/edit?name=nightly",
    "search": "/search",
    "found-nothing": "/search?q=none-such",
    "consumers": "/consumers",
    "managers": "/managers",
    "text-search": "/search?q=left&in=text",
    "texts-found": "/search?q=rather&in=text",
    "trouble": "/topics/none-such",
    "unknown": "/none-such",
}
MINUTE_MS = 60_000


def samples(site: Site, topic: str) -> None:
    """Three hours of counters, as sampled by a manager."""
    key, now = f"lisa:{{{topic}}}", now_ms()
    counters: dict[Any, Any] = {"sent": 0, "acked@lisa": 0, "late:c@lisa": 0, "late:e@lisa": 0}
    for i in range(180, 1, -1):
        n = 240 + 60 * (i % 7)
        counters["sent"] += n
        counters["acked@lisa"] += n
        counters["late:c@lisa"] += n - n // 20
        counters["late:e@lisa"] += n // 20
        site.raw.xadd(f"{key}:history", counters, id=f"{(now // MINUTE_MS - i) * MINUTE_MS}-0")
    site.raw.hset(f"{key}:stats", mapping=counters)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A dozen topics; one of them has messages in every state, and hostile input."""
    with running_site("--allow-actions") as running:
        running.raw.hset("lisa:{orders}:options", "journal", "1")
        samples(running, "orders")
        for topic in NAMES:
            bodies = [Outgoing({"n": i}, delay=timedelta(minutes=1 + i * i)) for i in range(1, 40)]
            running.producer.send_many(topic, bodies)
        running.producer.send("orders", {"n": 1}, id="order-1", delay=timedelta(hours=2))
        running.producer.send(
            "invoices", "rather long", id="invoice-2026-11-24-00004711", delay=timedelta(hours=9)
        )
        running.kill("orders", "dead-order", {"order": 7, "note": HOSTILE}, "no stock <left>")
        running.kill("orders", HOSTILE_ID, {HOSTILE: HOSTILE}, HOSTILE)
        running.kill("orders", "bytes", b"\x00\xff<b>", "cannot read this")
        running.producer.schedule(
            "nightly", topic="reports.nightly", body={HOSTILE: 1}, cron="15 3 * * MON-FRI",
            tz="America/Argentina/Buenos_Aires", headers={"source": "shop"},
        )  # fmt: skip
        running.raw.hset("lisa:{sms}:options", "paused", "1")
        for topic in ("sms", "stock.release"):  # due, but paused, or without a consumer
            running.producer.send(topic, 1)
        with Consumer(running.server.url, name="worker") as consumer:
            consumer.on("orders")(lambda _message: None)
            consumer.start()
            wait_until(lambda: running.raw.hlen("lisa:{orders}:consumers") > 0)
            yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(browser: Any, site: Site, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, color_scheme=scheme, bypass_csp=True
    )
    tab = Tab(context.new_page(), site.url)
    wrong = []
    for name, path in PAGES.items():
        tab.open(path)
        if name == "topic":
            tab.page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
        wrong += [(name, *one) for one in tab.violations()]
    context.close()
    assert wrong == []


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_nothing_scrolls_sideways(browser: Any, site: Site, width: int, height: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": height})
    tab = Tab(context.new_page(), site.url)
    too_wide = []
    for name, path in PAGES.items():
        tab.open(path)
        if tab.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            too_wide.append(name)
        tab.shot(f"{name}-{width}", whole=name != "overview")
    context.close()
    assert too_wide == []


BROKEN_WORDS = """() => {
  const broken = [];
  for (const cell of document.querySelectorAll('td, th')) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      for (const word of node.data.matchAll(/[^\\s-]+/g)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (lines.size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}"""
SMALL_TARGETS = """() => {
  const found = [];
  const wanted = 'button, input:not([type=hidden]), select, textarea, summary, nav a, .dense a, '
    + '.attention a, .dead a, main p > a:only-child';
  for (const one of document.querySelectorAll(wanted)) {
    const box = (one.closest('label.pick') ?? one).getBoundingClientRect();
    if (box.height && (box.height < 39.5 || box.width < 39.5)) found.push(one.outerHTML);
  }
  return found;
}"""


def test_a_phone_breaks_no_word_and_has_large_targets(browser: Any, site: Site) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    tab = Tab(context.new_page(), site.url)
    wrong = []
    for name, path in PAGES.items():
        tab.open(path)
        for found in (BROKEN_WORDS, SMALL_TARGETS):
            wrong += [(name, one) for one in tab.page.evaluate(found)]
    context.close()
    assert wrong == []


def test_a_phone_shows_the_columns_that_matter(browser: Any, site: Site) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    tab = Tab(context.new_page(), site.url)
    tab.open("/")
    heads = tab.page.locator("#live thead th:visible").all_inner_texts()
    assert [one.strip() for one in heads] == [
        "Topic",
        "Oldest due",
        "Consumers",
        "Ready",
        "Retry",
        "Garbage",
    ]
    context.close()


def test_the_first_screen_shows_every_topic(tab: Tab) -> None:
    tab.open("/")
    tab.until("document.querySelectorAll('.attention li').length >= 2")
    tab.until("document.querySelectorAll('#live tbody tr').length >= 12")
    heads = [text.strip() for text in tab.page.locator("#live thead th").all_inner_texts()]
    for wanted in ("Waiting", "Ready", "In flight", "Garbage", "Late p99"):
        column = heads.index(wanted)
        for row in tab.page.locator("#live tbody tr").all():
            box = row.locator("th,td").nth(column).bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= 800
            assert box["x"] + box["width"] <= 1280
    assert tab.page.locator("#t-orders td").nth(5).inner_text() == "3"  # garbage
    tab.shot("first-screen")


def test_all_requests_go_to_the_page_s_own_host(tab: Tab) -> None:
    for path in PAGES.values():
        tab.open(path)
    tab.page.wait_for_timeout(2_200)  # one update
    assert tab.hosts == {tab.url.removeprefix("http://")}
    tab.complaints = [one for one in tab.complaints if "404" not in one]  # the error page


def test_the_page_updates_without_a_reload(tab: Tab, site: Site) -> None:
    site.producer.send("live", 1, delay=timedelta(hours=1))
    tab.open("/topics/live")
    tab.page.evaluate("window.loaded = 'once'")
    tab.page.locator(".ways a").first.focus()
    tab.page.evaluate("scrollTo(0, 120)")
    site.producer.send_many("live", range(41), delay=timedelta(hours=1))
    tab.until("document.querySelector('.tile dd').innerText.startsWith('42')")
    assert tab.page.evaluate("window.loaded") == "once"
    assert tab.page.evaluate("document.activeElement.innerText") == "Messages"
    assert tab.page.evaluate("scrollY") == 120


def test_open_sections_and_typed_text_survive_updates(tab: Tab) -> None:
    tab.open("/topics/orders")
    tab.page.locator("#due-table summary").click()
    tab.page.fill("#find", "half an i")
    seen = tab.page.evaluate("performance.getEntriesByType('resource').length")
    tab.until("n => performance.getEntriesByType('resource').length >= n + 2", seen)
    assert tab.page.evaluate("document.querySelector('#due-table').open")
    assert tab.page.input_value("#find") == "half an i"


def test_live_updates_can_be_switched_off(tab: Tab) -> None:
    tab.open("/")
    tab.page.get_by_role("button", name="Live").click()
    assert tab.page.locator("#beat").get_attribute("aria-pressed") == "false"
    tab.page.wait_for_timeout(300)
    seen = tab.page.evaluate("performance.getEntriesByType('resource').length")
    tab.page.wait_for_timeout(2_500)
    assert tab.page.evaluate("performance.getEntriesByType('resource').length") == seen
    tab.page.get_by_role("button", name="Live").click()
    tab.until("n => performance.getEntriesByType('resource').length > n", seen)


INK = """(id) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const points = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < points.length; i += 4)
    if (points[i + 3] > 200) seen.add([0, 1, 2].map((k) => points[i + k] >> 5).join());
  return seen.size;
}"""


def test_plots_are_drawn_and_stay_drawn(tab: Tab) -> None:
    tab.open("/topics/orders")
    tab.until("document.querySelectorAll('figure canvas').length === 4")
    for plot in ("chart-due", "chart-late", "chart-rate", "chart-garbage"):
        assert tab.page.evaluate(INK, plot) >= 3, plot  # axes, grid, and lines in their colours
    seen = tab.page.evaluate("performance.getEntriesByType('resource').length")
    tab.until("n => performance.getEntriesByType('resource').length >= n + 2", seen)
    tab.page.wait_for_timeout(100)
    for plot in ("chart-due", "chart-late", "chart-rate", "chart-garbage"):
        assert tab.page.evaluate(INK, plot) >= 3, plot
    assert tab.page.locator("#late-table tbody tr").count() >= 55
    assert "1.9 ms" in tab.page.locator("#late-table").text_content()
    tab.page.emulate_media(color_scheme="dark")
    tab.until("document.querySelectorAll('figure canvas').length === 4")
    tab.shot("topic-dark", whole=True)


def test_hostile_input_is_shown_as_text(tab: Tab) -> None:
    tab.open("/topics/orders/garbage")
    assert tab.page.locator(".reason").filter(has_text=HOSTILE).count() == 1
    tab.page.get_by_role("link", name=HOSTILE_ID, exact=True).click()
    assert tab.text("h1") == HOSTILE_ID
    assert HOSTILE.replace('"', '\\"') in tab.page.locator("pre.body").inner_text()
    assert "owned" not in tab.page.title()
    tab.open("/topics/orders/messages?state=garbage")
    tab.page.get_by_role("link", name=HOSTILE_ID, exact=True).click()
    assert tab.text("h1") == HOSTILE_ID
    tab.page.fill("#find", HOSTILE_ID)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/messages/**")
    assert tab.text("h1") == HOSTILE_ID
    tab.page.fill("#find", HOSTILE)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/search?**")
    assert HOSTILE in tab.text("main")


def test_a_message_page_shows_its_whole_history(tab: Tab) -> None:
    tab.open("/topics/orders/messages/dead-order")
    states = tab.page.locator(".story .state").all_inner_texts()
    assert states == ["sent", "ready", "in flight", "garbage"]
    assert "no stock <left>" in tab.text(".story li:last-child")
    assert '"order": 7' in tab.text("pre.body")
    tab.open("/topics/invoices")
    tab.open("/topics/invoices/messages?state=waiting")
    tab.page.locator("tbody a").first.click()
    assert "keeps no journal" in tab.text("main")
    assert "waiting" in tab.text(".facts")


def test_bytes_are_shown_as_such(tab: Tab) -> None:
    tab.open("/topics/orders/messages/bytes")
    assert "00 ff 3c 62 3e" in tab.text("pre.body")
    tab.page.get_by_text("As base64").click()
    assert "AP88Yj4=" in tab.text("details pre")


FOCUSED = """(() => {
  const one = document.activeElement;
  return [one.innerText, getComputedStyle(one).outlineStyle, one.tagName];
})()"""


def test_the_keyboard_is_enough(tab: Tab) -> None:
    tab.open("/")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "skip"
    assert tab.page.evaluate("document.activeElement.getBoundingClientRect().left") == 0
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"
    reached = set()
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        found = tab.page.evaluate(FOCUSED)
        if found[0] and found[2] != "BODY":  # beyond the last, before the first
            reached.add(found[0])
            assert found[1] != "none", found
    assert {"Waiting", "Garbage", "Late p99", "orders", "webhooks"} <= reached
    tab.page.locator("#t-orders a").first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/topics/orders")
    tab.page.locator("#due-table summary").focus()
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.querySelector('#due-table').open")


def test_many_topics_are_filtered_sorted_and_paged(tab: Tab, site: Site) -> None:
    site.raw.zadd("lisa:topics", {f"many-{i:03}": now_ms() for i in range(120)})
    site.producer.send_many("many-077", range(5), delay=timedelta(hours=1))
    try:
        tab.open("/")
        tab.until("document.querySelector('.pages') !== null")
        tab.page.get_by_role("link", name="Next").click()
        tab.page.wait_for_url("**page=2**")
        tab.open("/")
        tab.page.fill("#q", "MANY-")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url("**q=MANY-**")
        tab.page.get_by_role("link", name="Waiting").click()
        tab.page.wait_for_url("**sort=waiting**")
        assert tab.page.locator("tbody th").first.inner_text() == "many-077"
        assert tab.page.locator('th[aria-sort="descending"]').inner_text() == "Waiting"
    finally:
        site.raw.zrem("lisa:topics", *(f"many-{i:03}" for i in range(120)))


def test_it_can_be_read_without_scripts(browser: Any, site: Site) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = Tab(context.new_page(), site.url)
    tab.open("/topics/orders")
    tab.page.locator("#late-table summary").click()
    assert tab.page.locator("#late-table tbody tr").first.is_visible()
    assert not tab.page.locator("#beat").is_visible()
    tab.open("/topics/orders/garbage")
    assert tab.page.get_by_role("button", name="Requeue dead-order").is_visible()
    context.close()


def test_messages_held_by_a_consumer_are_listed(tab: Tab, site: Site) -> None:
    with Consumer(site.server.url, name="holder") as consumer:
        site.producer.send("holding", {"a": 1}, id="held-1")
        (delivery,) = consumer.pull(
            "holding", wait=timedelta(seconds=10), ack_timeout=timedelta(minutes=5)
        )
        tab.open("/topics/holding/messages/held-1")
        assert "in flight" in tab.text(".facts")
        tab.page.locator(".facts a").click()
        tab.page.wait_for_url("**/consumers?**")
        assert "held-1" in tab.text("tbody")
        assert "holder" in tab.text("h1")
        delivery.ack()
        tab.until("document.querySelector('#live').innerText.includes('No messages in flight')")
    tab.open("/topics/holding/messages/held-1")
    assert "acked" in tab.text(".facts")


def test_a_banner_is_shown_during_an_outage(browser: Any) -> None:
    with running_site() as site:
        site.producer.send("orders", 1, delay=timedelta(hours=1))
        waiting(site, "orders", 1)
        context = browser.new_context()
        tab = Tab(context.new_page(), site.url)
        tab.open("/topics/orders")
        tab.page.evaluate("window.loaded = 'once'")
        site.server.kill()
        tab.until("document.getElementById('banner').innerText.includes('does not respond')")
        assert "orders" in tab.text("h1")  # the last content remains
        badge = tab.page.get_by_role("button", name="as of").inner_text()
        assert re.fullmatch(r"as of \d\d:\d\d:\d\d", badge)
        tab.shot("server-away")
        site.server.restart()
        tab.until("document.getElementById('banner').innerText === ''")
        assert tab.page.evaluate("window.loaded") == "once"
        assert tab.text("#beat") == "Live"
        context.close()


def test_an_error_page_reloads_after_an_outage(browser: Any) -> None:
    with running_site() as site:
        site.producer.send("orders", 1, delay=timedelta(hours=1))
        context = browser.new_context()
        tab = Tab(context.new_page(), site.url)
        site.server.kill()
        wait_until(lambda: site.gateway.client.get("/").status_code == 503)
        tab.open("/")
        assert "does not respond" in tab.text("h1")
        tab.until("document.querySelector('#beat').innerText === 'no data'")
        site.server.restart()
        tab.until("document.querySelector('#t-orders') !== null")
        context.close()
