"""The page's actions, performed with the mouse in a browser."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from tests.browser.conftest import Tab
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.browser.conftest import Site


def dead(site: Site, n: int) -> tuple[str, list[str]]:
    """Put `n` messages in a topic's garbage and pause the topic; the topic and the ids."""
    topic = new_topic("dead")
    ids = [f"m{i}" for i in range(n)]
    for message_id in ids:
        site.kill(topic, message_id, {"id": message_id}, f"reason of {message_id}")
    site.raw.hset(f"lisa:{{{topic}}}:options", "paused", "1")  # requeued messages stay visible
    return topic, ids


def retrying_and_dead(site: Site, topic: str) -> tuple[set[str], set[str]]:
    """Ids in the garbage, and ids in retry."""
    head = f"lisa:{{{topic}}}:g:lisa:"

    def ids(state: str) -> set[str]:
        found = cast("list[bytes]", site.raw.zrange(head + state, 0, -1))
        return {one.decode() for one in found}

    return ids("garbage"), ids("retry")


def test_one_message_is_requeued_immediately(tab: Tab, site: Site) -> None:
    topic, _ = dead(site, 2)
    tab.open(f"/topics/{topic}/garbage")
    tab.page.get_by_role("button", name="Requeue m1").click()
    tab.page.wait_for_url("**did=requeued**")
    assert tab.text(".notice") == "Requeued 1 of 1."
    assert retrying_and_dead(site, topic) == ({"m0"}, {"m1"})
    assert tab.page.locator("a.id").all_inner_texts() == ["m0"]


def test_selected_messages_are_purged_after_confirmation(tab: Tab, site: Site) -> None:
    topic, _ = dead(site, 3)
    tab.open(f"/topics/{topic}/garbage")
    tab.page.get_by_role("checkbox", name="Select m0").check()
    tab.page.get_by_role("checkbox", name="Select m2").check()
    tab.page.locator(".purge summary").click()
    tab.page.get_by_role("button", name="Purge selected").click()
    assert tab.text("h1") == "Purge 2 messages?"
    assert "This cannot be undone." in tab.text(".dialog")
    assert retrying_and_dead(site, topic)[0] == {"m0", "m1", "m2"}
    tab.page.get_by_role("link", name="Go back").click()
    tab.page.get_by_role("button", name="Select all").click()
    tab.page.get_by_role("checkbox", name="Select m1").uncheck()
    tab.page.locator(".purge summary").click()
    tab.page.get_by_role("button", name="Purge selected").click()
    tab.page.get_by_role("button", name="Purge 2 messages").click()
    tab.page.wait_for_url("**did=purged**")
    assert tab.text(".notice") == "Purged 2 of 2."
    assert retrying_and_dead(site, topic) == ({"m1"}, set())
    found = site.producer.get(topic, "m0")
    assert found is not None
    assert found.state == "purged"


def test_all_that_match_are_requeued(tab: Tab, site: Site) -> None:
    topic, _ = dead(site, 4)
    tab.open(f"/topics/{topic}/garbage")
    tab.page.fill("#reason", "OF M2")
    tab.page.get_by_role("button", name="Filter").click()
    assert tab.page.locator("a.id").all_inner_texts() == ["m2"]
    tab.page.get_by_role("button", name="Requeue all matches").click()
    assert tab.text("h1") == "Requeue 1 message?"
    tab.page.get_by_label("Pace").select_option("10/s")
    tab.page.get_by_role("button", name="Requeue 1 message").click()
    tab.page.wait_for_url("**did=requeued**")
    assert retrying_and_dead(site, topic) == ({"m0", "m1", "m3"}, {"m2"})
    tab.open(f"/topics/{topic}/garbage")
    tab.page.locator(".purge summary").click()
    tab.page.get_by_role("button", name="Purge all").click()
    assert tab.text("h1") == "Purge 3 messages?"
    tab.page.get_by_role("button", name="Purge 3 messages").click()
    tab.page.wait_for_url("**did=purged**")
    assert retrying_and_dead(site, topic) == (set(), {"m2"})
    assert "The garbage is empty" in tab.text("main")


def test_garbage_is_looked_through_page_by_page(tab: Tab, site: Site) -> None:
    topic = new_topic("pages")
    site.kill(topic, "first", 1, "no")
    head = f"lisa:{{{topic}}}:"
    body: Any = site.raw.get(head + "body:first")
    for i in range(60):
        site.raw.set(f"{head}body:x{i:02}", body)
        site.raw.zadd(head + "g:lisa:garbage", {f"x{i:02}": 10**13 + i})
    tab.open(f"/topics/{topic}/garbage")
    seen = tab.page.locator("a.id").all_inner_texts()
    while tab.page.get_by_role("link", name="Next").count():
        tab.page.get_by_role("link", name="Next").click()
        tab.page.wait_for_url("**cursor=**")
        seen += tab.page.locator("a.id").all_inner_texts()
    assert seen == [*(f"x{i:02}" for i in reversed(range(60))), "first"]


def test_a_topic_is_paused_and_resumed(tab: Tab, site: Site) -> None:
    topic = new_topic()
    site.producer.send(topic, 1, delay=timedelta(hours=1))
    tab.open(f"/topics/{topic}")
    tab.page.get_by_role("button", name="Pause").click()
    tab.page.wait_for_url("**did=paused**")
    assert site.raw.hget(f"lisa:{{{topic}}}:options", "paused") == b"1"
    tab.until("document.querySelector('h1 .badge') !== null")
    tab.page.get_by_role("button", name="Resume").click()
    tab.page.wait_for_url("**did=resumed**")
    assert site.raw.hget(f"lisa:{{{topic}}}:options", "paused") == b"0"


def test_a_message_is_moved_fired_and_cancelled(tab: Tab, site: Site) -> None:
    topic = new_topic()
    for name in ("moved", "fired", "ended"):
        site.producer.send(topic, {"a": 1}, id=name, delay=timedelta(hours=1))
    before = site.producer.get(topic, "moved")
    tab.open(f"/topics/{topic}/messages/moved")
    tab.page.fill("#delay", "3h")
    tab.page.get_by_role("button", name="Reschedule").click()
    tab.page.wait_for_url("**did=reschedule**")
    assert tab.text(".notice") == "The message has a new due time."
    after = site.producer.get(topic, "moved")
    assert before is not None
    assert after is not None
    assert (after.due_ms or 0) - (before.due_ms or 0) > timedelta(hours=1.9).total_seconds() * 1000

    tab.page.fill("#at_local", "2030-12-24T09:00")
    tab.page.fill("#tz", "Asia/Tokyo")
    tab.page.get_by_role("button", name="Reschedule").click()
    wait_until(lambda: site.raw.zscore(f"lisa:{{{topic}}}:waiting", "moved") == 1_924_300_800_000)

    tab.open(f"/topics/{topic}/messages/fired")
    tab.page.get_by_role("button", name="Fire now").click()
    tab.page.wait_for_url("**did=fire**")
    wait_until(lambda: site.raw.zscore(f"lisa:{{{topic}}}:waiting", "fired") != before.due_ms)

    tab.open(f"/topics/{topic}/messages/ended")
    tab.page.get_by_role("button", name="Cancel").click()
    tab.page.get_by_role("button", name="Cancel 1 message").click()
    tab.page.wait_for_url("**did=cancel**")
    assert tab.text(".notice") == "The message is cancelled and will not be delivered."
    assert "cancelled" in tab.text(".facts")
    found = site.producer.get(topic, "ended")
    assert found is not None
    assert found.state == "cancelled"


def test_a_dead_message_is_requeued_from_its_own_page(tab: Tab, site: Site) -> None:
    topic, _ = dead(site, 1)
    tab.open(f"/topics/{topic}/messages/m0")
    tab.page.get_by_role("button", name="Requeue", exact=True).click()
    tab.page.wait_for_url("**did=requeued**")
    assert retrying_and_dead(site, topic) == (set(), {"m0"})
    assert "retry" in tab.text(".facts")


def test_a_dead_message_is_edited_and_its_id_copied(tab: Tab, site: Site) -> None:
    topic, _ = dead(site, 1)
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open(f"/topics/{topic}/garbage")
    tab.page.get_by_role("link", name="Edit and requeue m0").click()
    tab.page.get_by_role("button", name="Copy id").click()
    tab.until("navigator.clipboard.readText().then((text) => text === 'm0')")
    tab.page.get_by_label("Body (JSON)").fill('{"id": "edited"}')
    tab.page.get_by_role("button", name="Requeue edited message").click()
    tab.page.wait_for_url("**did=edit**")
    assert "has replaced the dead one" in tab.text(".notice")
    found = site.producer.get(topic, "m0")
    assert found is not None
    assert (found.state, found.body) == ("waiting", {"id": "edited"})  # the topic is paused


def test_a_visitor_logs_in_acts_and_logs_out(browser: Any, site: Site, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yml"
    tokens.write_text("tokens: [{name: all, token: everything-everything}]", encoding="utf-8")
    topic = new_topic()
    site.producer.send(topic, 1, delay=timedelta(hours=1))
    arguments = ("--tokens-file", str(tokens), "--allow-actions")
    with Gateway(site.server.url, *arguments) as guarded:
        context = browser.new_context()
        tab = Tab(context.new_page(), guarded.url).listen()
        tab.open(f"/topics/{topic}")
        tab.page.get_by_label("Token").fill("not-the-right-token")
        tab.page.keyboard.press("Enter")
        tab.page.get_by_role("alert").wait_for()
        tab.page.get_by_label("Token").fill("everything-everything")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url(f"**/topics/{topic}")
        assert tab.page.evaluate("document.cookie") == ""  # out of any script's reach
        assert "everything" not in tab.page.url
        tab.page.get_by_role("button", name="Pause").click()
        tab.page.wait_for_url("**did=paused**")
        assert tab.page.locator("h1 .badge").inner_text() == "paused"
        context.clear_cookies()  # as if the session ended while the page is open
        tab.page.wait_for_url("**/login?**")
        tab.page.get_by_label("Token").fill("everything-everything")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url(f"**/topics/{topic}**")
        tab.page.get_by_role("button", name="Log out").click()
        tab.page.wait_for_url("**/login")
        assert tab.open("/").url.endswith("/login")
        context.close()
    assert [one for one in tab.complaints if "401" not in one and "403" not in one] == []


def test_the_pages_that_ask_are_accessible(browser: Any, site: Site) -> None:
    topic, _ = dead(site, 1)
    secret = {"LISA_GATEWAY_SERVER__TOKEN": "everything-everything"}
    with Gateway(site.server.url, "--allow-actions", env=secret) as guarded:
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme, bypass_csp=True)
            tab = Tab(context.new_page(), guarded.url)
            tab.open(f"/topics/{topic}/garbage")
            assert tab.violations() == []  # asks for a token
            tab.page.get_by_label("Token").fill("not-the-right-token")
            tab.page.keyboard.press("Enter")
            tab.page.get_by_role("alert").wait_for()
            assert tab.violations() == []
            tab.page.get_by_label("Token").fill("everything-everything")
            tab.page.keyboard.press("Enter")
            tab.page.get_by_role("button", name="Requeue all").click()
            tab.page.get_by_label("Pace").wait_for()
            assert tab.violations() == []
            context.close()
