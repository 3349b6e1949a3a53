"""The page in a browser: layout, live updates, accessibility, and actions with the mouse."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from lisa import Consumer, Outgoing
from tests.browser.conftest import Site, Tab, new_tab, now_ms, running_site
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

HOUR = timedelta(hours=1)
HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>alert(1)</script>"
HIDING_ID = "evil\u202egpj.exe"
HOSTILE_ID = "\"><svg onload=alert(1)>'/../x?y=1#z%41"
NAMES = (
    *("billing.retry", "carts.abandoned", "invoices", "mail.reminder", "mail.welcome", "orders"),
    *("reports.nightly", "search.reindex", "sms", "stock.release", "trials.ending", "webhooks"),
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
    "all-schedules": "/schedules",
    "hiding": f"/topics/orders/messages/{quote(HIDING_ID)}",
    "schedule": "/topics/reports.nightly/schedule?name=nightly",
    "schedule-form": "/topics/reports.nightly/schedule/edit?name=nightly",
    "search": "/search",
    "found-nothing": "/search?q=none-such",
    "key": "/topics/orders/keys/order-42",
    "keyed-message": "/topics/orders/messages/order-42%1Freminder",
    "consumers": "/consumers",
    "managers": "/managers",
    "text-search": "/search?q=left&in=text",
    "texts-found": "/search?q=rather&in=text",
    "trouble": "/topics/none-such",
    "unknown": "/none-such",
}
DARK = ("overview", "topic", "garbage", "message", "key", "schedule-form", "texts-found")
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
        running.option("orders", "journal", "1")
        samples(running, "orders")
        for topic in NAMES:
            bodies = [Outgoing({"n": i}, delay=timedelta(minutes=1 + i * i)) for i in range(1, 40)]
            running.producer.send_many(topic, bodies)
        running.producer.send("orders", {"n": 1}, id="order-1", delay=2 * HOUR)
        running.producer.send(
            "invoices", "rather long", id="invoice-2026-11-24-00004711", delay=9 * HOUR
        )
        running.producer.send("orders", 1, key="order-42", id="reminder", delay=2 * HOUR)
        running.producer.send("orders", 1, key="order-42", delay=48 * HOUR)
        running.kill("orders", "dead-order", {"order": 7, "note": HOSTILE}, "no stock <left>")
        running.kill("orders", HOSTILE_ID, {HOSTILE: HOSTILE}, HOSTILE)
        long = {"trace" * 9: "word " * 60}
        running.producer.send("orders", {HIDING_ID: 1}, id=HIDING_ID, delay=HOUR, headers=long)
        running.kill("orders", "bytes", b"\x00\xff<b>", "cannot read this")
        running.producer.schedule(
            "nightly", topic="reports.nightly", body={HOSTILE: 1}, cron="15 3 * * MON-FRI",
            tz="America/Argentina/Buenos_Aires", headers={"source": "shop"},
        )  # fmt: skip
        running.option("sms", "paused", "1")
        for topic in ("sms", "stock.release"):  # due, but paused, or without a consumer
            running.producer.send(topic, 1)
        with Consumer(running.server.url, name="worker") as consumer:
            consumer.on("orders")(lambda _message: None)
            consumer.start()
            wait_until(lambda: running.raw.hlen("lisa:{orders}:consumers") > 0)
            yield running


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
BACKGROUNDS = """which => [...document.querySelectorAll(".top nav a, .tabs a")]
  .filter((one) => one.matches(which)).map((one) => getComputedStyle(one).backgroundColor)"""
TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"


def test_every_page_is_accessible_and_fits_its_screen(browser: Any, site: Site) -> None:
    """On a phone, no word is broken, and targets are large enough for a finger."""
    wrong: list[Any] = []
    for scheme, names in (("light", tuple(PAGES)), ("dark", DARK)):
        with new_tab(browser, site.url, color_scheme=scheme, bypass_csp=True) as tab:
            for name in names:
                tab.open(PAGES[name])
                everything = "all => all.forEach(one => one.open = true)"
                tab.page.eval_on_selector_all("details", everything)
                wrong += [(scheme, name, *one) for one in tab.violations()]
                wrong += [(name, "too wide")] * tab.page.evaluate(TOO_WIDE)
                tab.shot(f"{name}-{scheme}", whole=name != "overview")
    with new_tab(browser, site.url, forced_colors="active", bypass_csp=True) as tab:
        for name in ("overview", "topic"):  # one item of each list is the current one
            tab.open(PAGES[name])
            wrong += [("forced colours", name, *one) for one in tab.violations()]
            current = tab.page.evaluate(BACKGROUNDS, "[aria-current]")
            others = tab.page.evaluate(BACKGROUNDS, ":not([aria-current])")
            wrong += [(name, "current as others", one) for one in current if one in others]
    below = {"LISA_GATEWAY_SERVER__BASE_PATH": "/lisa"}
    with (
        Gateway(site.server.url, "--prefix", "unused", env=below) as empty,
        new_tab(browser, empty.url, bypass_csp=True) as tab,
    ):
        tab.open("/lisa/")
        wrong += [("empty", *one) for one in tab.violations()]
        assert f"{empty.url}/lisa/v1/topics/orders/messages" in tab.text("main")
    with new_tab(browser, site.url, viewport={"width": 320, "height": 700}) as tab:
        for name, path in PAGES.items():
            tab.open(path)
            wrong += [(name, "too wide for 320 px")] * tab.page.evaluate(TOO_WIDE)
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
    with new_tab(browser, site.url, **phone) as tab:
        for name, path in PAGES.items():
            tab.open(path)
            wrong += [(name, "too wide")] * tab.page.evaluate(TOO_WIDE)
            for found in (BROKEN_WORDS, SMALL_TARGETS):
                wrong += [(name, one) for one in tab.page.evaluate(found)]
            tab.shot(f"{name}-390", whole=name != "overview")
        tab.open("/")
        heads = tab.page.locator("#live thead th:visible").all_inner_texts()
    assert wrong == []
    shown = ["Topic", "Oldest due", "Consumers", "Ready", "Retry", "Garbage"]
    assert [one.strip() for one in heads] == shown


@pytest.mark.sample
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


def test_the_page_updates_without_a_reload_until_switched_off(tab: Tab, site: Site) -> None:
    """Focus, position, open sections and typed text survive; the browser's clock is the test's."""
    page = tab.page
    page.clock.install()
    site.producer.send("live", 1, delay=HOUR)
    tab.open("/topics/live")
    page.evaluate("window.loaded = 'once'")
    page.locator("#due-table summary").click()
    page.fill("#find", "half an i")
    page.locator(".ways a").first.focus()
    page.evaluate("scrollTo(0, 120)")
    site.producer.send_many("live", range(41), delay=HOUR)

    def is_updated() -> bool:
        page.clock.run_for(2_000)
        page.wait_for_load_state("networkidle")
        return tab.text(".tile dd").startswith("42")

    wait_until(is_updated)
    kept = "[loaded, document.activeElement.innerText, scrollY]"
    assert page.evaluate(kept) == ["once", "Messages", 120]
    assert page.input_value("#find") == "half an i"
    assert page.evaluate("document.querySelector('#due-table').open")
    tab.press("Live")
    assert page.locator("#beat").get_attribute("aria-pressed") == "false"
    page.wait_for_load_state("networkidle")
    before = len(tab.requests)
    page.clock.run_for(60_000)
    assert len(tab.requests) == before
    tab.press("Live")
    wait_until(lambda: page.evaluate("true") and len(tab.requests) > before)
    assert {one.split("/")[2] for one in tab.requests} == {site.url.removeprefix("http://")}


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
    for _ in range(2):
        tab.until("document.querySelectorAll('figure canvas').length === 4")
        for plot in ("chart-due", "chart-late", "chart-rate", "chart-garbage"):
            assert tab.page.evaluate(INK, plot) >= 3, plot  # axes, grid, and lines in colours
        seen = tab.page.evaluate("performance.getEntriesByType('resource').length")
        tab.until("n => performance.getEntriesByType('resource').length >= n + 2", seen)
        tab.page.wait_for_timeout(100)
    assert tab.page.locator("#late-table tbody tr").count() >= 55
    assert "1.9 ms" in tab.page.locator("#late-table").text_content()
    tab.page.emulate_media(color_scheme="dark")
    tab.until("document.querySelectorAll('figure canvas').length === 4")


def test_hostile_input_is_shown_as_text(tab: Tab) -> None:
    tab.open("/topics/orders/garbage")
    assert tab.page.locator(".reason").filter(has_text=HOSTILE).count() == 1
    for path in ("/topics/orders/garbage", "/topics/orders/messages?state=garbage"):
        tab.open(path)
        tab.page.get_by_role("link", name=HOSTILE_ID, exact=True).click()
        assert tab.text("h1") == HOSTILE_ID
    assert HOSTILE.replace('"', '\\"') in tab.page.locator("pre.body").inner_text()
    assert "owned" not in tab.page.title()
    for wanted, address in ((HOSTILE_ID, "**/messages/**"), (HOSTILE, "**/search?**")):
        tab.page.fill("#find", wanted)
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url(address)
        assert wanted in tab.text("main")


def test_what_would_hide_or_reorder_text_is_escaped(tab: Tab) -> None:
    """It is copied, searched and sent with forms as it is."""
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open("/search?q=evil")
    shown = HIDING_ID.replace("\u202e", "\\u202e")
    assert "\u202e" not in tab.page.content()
    tab.follow(shown, "/messages/")
    assert tab.text("h1") == shown
    assert shown in tab.text("pre.body")
    tab.press("Copy id")
    tab.until("async (id) => (await navigator.clipboard.readText()) === id", HIDING_ID)
    tab.press("Fire now", "did=fire")
    tab.open(f"/search?q={quote(shown)}")
    tab.page.wait_for_url("**/messages/**")


LABELS = """(() => {
  window.cut = [];
  window.drawn = 0;
  window.repeated = [];
  const places = new Map();
  const draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
    const { width } = this.measureText(text);
    const at = this.getTransform().transformPoint({ x, y });
    const key = this.canvas.closest("figure")?.id + text;
    const moved = Math.abs((places.get(key) ?? at.x) - at.x);
    if (/:/.test(text) && moved > 5) window.repeated.push(text);
    places.set(key, at.x);
    const left = at.x - { center: width / 2, right: width, end: width }[this.textAlign] || at.x;
    const isTurned = this.getTransform().b !== 0;
    window.drawn += 1;
    if (!isTurned && (left < 0 || left + width > this.canvas.width)) window.cut.push([text, left]);
    draw.call(this, text, x, y, ...more);
  };
})()"""


def test_no_label_of_a_chart_is_cut(browser: Any, site: Site) -> None:
    topic, key = "late-labels", "lisa:{late-labels}:history"
    counters: dict[Any, Any] = {"sent": 0, "acked@lisa": 0, "garbage@lisa": 0}
    for i in range(50, 1, -1):
        counters = {name: n + 1_000_000 // i for name, n in counters.items()}
        counters[f"late:{chr(ord('a') + i // 2)}@lisa"] = 1_000 * i
        site.raw.xadd(key, counters, id=f"{(now_ms() // MINUTE_MS - i) * MINUTE_MS}-0")
    site.producer.send(topic, 1, delay=HOUR)
    for width in (1280, 320):
        with new_tab(browser, site.url, viewport={"width": width, "height": 800}) as tab:
            tab.page.add_init_script(LABELS)
            for past in ("hour", "week"):
                tab.open(f"/topics/{topic}?past={past}")
                tab.until("window.drawn > 40")
                assert tab.page.evaluate("window.cut") == []


COLOURED = """(id) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let n = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const colour = pixels.slice(i, i + 3);
    n += pixels[i + 3] > 200 && Math.max(...colour) - Math.min(...colour) > 60;
  }
  return n;
}"""


def test_the_first_minute_of_a_topic_is_drawn(browser: Any, site: Site) -> None:
    """A line of one point, on an axis shorter than a minute per label."""
    topic, minute = "young", now_ms() // MINUTE_MS * MINUTE_MS
    counters: dict[Any, Any] = {"sent": 9, "acked@lisa": 9, "late:d@lisa": 9}
    site.raw.xadd(f"lisa:{{{topic}}}:history", counters, id=f"{minute}-0")
    site.raw.hset(f"lisa:{{{topic}}}:stats", mapping=counters)
    site.producer.send(topic, 1, delay=HOUR)
    with new_tab(browser, site.url) as tab:
        tab.page.add_init_script(LABELS)
        tab.open(f"/topics/{topic}")
        tab.until("window.drawn > 20")
        assert tab.page.evaluate("window.repeated") == []
        assert tab.page.evaluate(COLOURED, "chart-late") > 4


def test_a_message_page_shows_its_history_and_its_body(tab: Tab, site: Site) -> None:
    tab.open("/topics/orders/messages/dead-order")
    states = tab.page.locator(".story .state").all_inner_texts()
    assert states == ["sent", "ready", "in flight", "garbage"]
    assert "no stock <left>" in tab.text(".story li:last-child")
    assert '"order": 7' in tab.text("pre.body")
    tab.open("/topics/orders/messages/bytes")
    assert "00 ff 3c 62 3e" in tab.text("pre.body")
    tab.page.get_by_text("As base64").click()
    assert "AP88Yj4=" in tab.text("details pre")
    with Consumer(site.server.url, name="holder") as consumer:
        site.producer.send("holding", {"a": 1}, id="held-1")
        wait = timedelta(seconds=10)
        (held,) = consumer.pull("holding", wait=wait, ack_timeout=timedelta(minutes=5))
        tab.open("/topics/holding/messages/held-1")
        assert "in flight" in tab.text(".facts")
        assert "keeps no journal" in tab.text("main")
        tab.page.locator(".facts a").click()
        tab.page.wait_for_url("**/consumers?**")
        assert "held-1" in tab.text("tbody")
        assert "holder" in tab.text("h1")
        held.ack()
        tab.until("document.querySelector('#live').innerText.includes('No messages in flight')")


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


def test_it_can_be_read_without_scripts(browser: Any, site: Site) -> None:
    with new_tab(browser, site.url, java_script_enabled=False) as tab:
        tab.open("/topics/orders")
        tab.page.locator("#late-table summary").click()
        assert tab.page.locator("#late-table tbody tr").first.is_visible()
        assert not tab.page.locator("#beat").is_visible()
        tab.open("/topics/orders/garbage")
        assert tab.page.get_by_role("button", name="Requeue dead-order").is_visible()


def test_an_outage_is_shown_until_it_ends(browser: Any) -> None:
    with running_site() as site, new_tab(browser, site.url) as tab:
        site.producer.send("orders", 1, delay=HOUR)
        tab.open("/topics/orders")
        tab.page.evaluate("window.loaded = 'once'")
        site.server.kill()
        tab.until("document.getElementById('banner').innerText.includes('does not respond')")
        assert "orders" in tab.text("h1")  # the last content remains
        badge = tab.page.get_by_role("button", name="as of").inner_text()
        assert re.fullmatch(r"as of \d\d:\d\d:\d\d", badge)
        site.server.restart()
        tab.until("document.getElementById('banner').innerText === ''")
        assert tab.page.evaluate("window.loaded") == "once"
        assert tab.text("#beat") == "Live"
        # A page that is opened during an outage loads as soon as it ends.
        site.server.kill()
        wait_until(lambda: site.gateway.client.get("/").status_code == 503)
        tab.open("/")
        assert "does not respond" in tab.text("h1")
        tab.until("document.querySelector('#beat').innerText === 'no data'")
        site.server.restart()
        tab.until("document.querySelector('#t-orders') !== null")


def dead(site: Site, n: int) -> str:
    """A paused topic with `n` messages in its garbage: m0, m1, ..."""
    topic = new_topic("dead")
    for i in range(n):
        site.kill(topic, f"m{i}", {"id": f"m{i}"}, f"reason of m{i}")
    site.option(topic, "paused", "1")  # requeued messages stay visible
    return topic


def test_garbage_is_requeued_and_purged(tab: Tab, site: Site) -> None:
    topic, page = dead(site, 5), tab.page

    def retried() -> set[bytes]:
        found: Any = site.raw.zrange(f"lisa:{{{topic}}}:g:lisa:retry", 0, -1)
        return set(found)

    tab.open(f"/topics/{topic}/garbage")
    tab.press("Requeue m4", "did=requeued")
    assert tab.text(".notice") == "Requeued 1 of 1."
    assert retried() == {b"m4"}
    page.get_by_role("checkbox", name="Select m0").check()
    page.locator(".purge summary").click()
    tab.press("Purge selected")
    assert tab.text("h1") == "Purge 1 message?"
    assert "This cannot be undone." in tab.text(".dialog")
    tab.follow("Go back")
    tab.press("Select all")
    for name in ("m1", "m3"):
        page.get_by_role("checkbox", name=f"Select {name}").uncheck()
    page.locator(".purge summary").click()
    tab.press("Purge selected")
    tab.press("Purge 2 messages", "did=purged")
    assert tab.text(".notice") == "Purged 2 of 2."
    assert set(site.garbage(topic)) == {"m1", "m3"}
    tab.open(f"/topics/{topic}/garbage")
    page.fill("#reason", "OF M1")
    tab.press("Filter")
    assert page.locator("a.id").all_inner_texts() == ["m1"]
    tab.press("Requeue all matches")
    assert tab.text("h1") == "Requeue 1 message?"
    page.get_by_label("Pace").select_option("10/s")
    tab.press("Requeue 1 message", "did=requeued")
    assert retried() == {b"m1", b"m4"}
    # The last one is edited.
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open(f"/topics/{topic}/garbage")
    tab.follow("Edit and requeue m3")
    tab.press("Copy id")
    tab.until("navigator.clipboard.readText().then((text) => text === 'm3')")
    page.get_by_label("Body (JSON)").fill('{"id": "edited"}')
    tab.press("Requeue edited message", "did=edit")
    assert "has replaced the dead one" in tab.text(".notice")
    found = site.message(topic, "m3")
    assert (found.state, found.body) == ("waiting", {"id": "edited"})
    tab.open(f"/topics/{topic}/garbage")
    assert "The garbage is empty" in tab.text("main")


def test_a_message_is_moved_fired_and_cancelled(tab: Tab, site: Site) -> None:
    topic, page = new_topic(), tab.page
    for name in ("moved", "fired", "ended"):
        site.producer.send(topic, {"a": 1}, id=name, delay=HOUR)

    def due(name: str) -> int:
        return int(site.raw.zscore(f"lisa:{{{topic}}}:waiting", name) or 0)

    before = due("moved")
    tab.open(f"/topics/{topic}/messages/moved")
    page.fill("#delay", "3h")
    tab.press("Reschedule", "did=reschedule")
    assert tab.text(".notice") == "The message has a new due time."
    assert due("moved") - before > 1.9 * HOUR.total_seconds() * 1000
    page.fill("#at_local", "2030-12-24T09:00")
    page.fill("#tz", "Asia/Tokyo")
    tab.press("Reschedule")
    wait_until(lambda: due("moved") == 1_924_300_800_000)

    before = due("fired")
    tab.open(f"/topics/{topic}/messages/fired")
    tab.press("Fire now", "did=fire")
    wait_until(lambda: due("fired") != before)

    tab.open(f"/topics/{topic}/messages/ended")
    tab.press("Cancel")
    tab.press("Cancel 1 message", "did=cancel")
    assert tab.text(".notice") == "The message is cancelled and will not be delivered."
    assert "cancelled" in tab.text(".facts")
    assert site.message(topic, "ended").state == "cancelled"


def test_a_visitor_logs_in_acts_and_logs_out(browser: Any, site: Site) -> None:
    topic, secret = dead(site, 1), "everything-everything"
    site.option(topic, "paused", "0")
    token = {"LISA_GATEWAY_SERVER__TOKEN": secret}
    with (
        Gateway(site.server.url, "--allow-actions", env=token) as guarded,
        new_tab(browser, guarded.url, bypass_csp=True) as tab,
    ):
        page = tab.page

        def log_in(token: str) -> None:
            page.get_by_label("Token").fill(token)
            page.keyboard.press("Enter")

        tab.open(f"/topics/{topic}")
        assert tab.violations() == []
        log_in("not-the-right-token")
        page.get_by_role("alert").wait_for()
        assert tab.violations() == []
        log_in(secret)
        page.wait_for_url(f"**/topics/{topic}")
        assert page.evaluate("document.cookie") == ""  # out of any script's reach
        assert secret not in page.url
        tab.press("Pause", "did=paused")
        assert page.locator("h1 .badge").inner_text() == "paused"
        tab.press("Resume", "did=resumed")
        assert site.raw.hget(f"lisa:{{{topic}}}:options", "paused") == b"0"
        page.context.clear_cookies()  # as if the session ended while the page is open
        page.wait_for_url("**/login?**")
        log_in(secret)
        page.wait_for_url(f"**/topics/{topic}**")
        tab.open(f"/topics/{topic}/garbage")
        tab.press("Requeue all")
        page.get_by_label("Pace").wait_for()
        assert tab.violations() == []
        tab.press("Log out", "/login")
        assert tab.open("/").url.endswith("/login")
    assert [one for one in tab.complaints if "401" not in one and "403" not in one] == []


def test_many_topics_are_filtered_sorted_and_paged(tab: Tab, site: Site) -> None:
    names = [f"many-{i:03}" for i in range(120)]
    site.raw.zadd("lisa:topics", dict.fromkeys(names, now_ms()))
    site.producer.send_many("many-077", range(5), delay=HOUR)
    try:
        tab.open("/")
        tab.until("document.querySelector('.pages') !== null")
        tab.follow("Next", "page=2")
        tab.open("/")
        tab.page.fill("#q", "MANY-")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url("**q=MANY-**")
        tab.follow("Waiting", "sort=waiting")
        assert tab.page.locator("tbody th").first.inner_text() == "many-077"
        assert tab.page.locator('th[aria-sort="descending"]').inner_text() == "Waiting"
    finally:
        site.raw.zrem("lisa:topics", *names)
