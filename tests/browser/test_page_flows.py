"""The page's data on a real server: history, forecast, and a message's events."""

from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa import Producer
from lisa.admin import history, story
from lisa.admin.history import ForecastStep, HistorySpan, Horizon, Outlook
from lisa.admin.live import Interval
from lisa.core.model.envelope import id_time_ms, new_id, new_ids
from lisa.gateway.page.rendering import count, message_link, span
from lisa.gateway.page.rendering import format_body as shown
from tests.browser.conftest import now_ms
from tests.roles import Cast

DASH = "\N{EN DASH}"
HOUR = HistorySpan.HOUR.step_ms * 60
MINUTE = HistorySpan.HOUR.step_ms
NOW = 1_800_000_030_000  # half a minute into a minute


def sample(client: redis.Redis, ms: int, **counters: int) -> None:
    fields: dict[Any, Any] = {name.replace("_at_", "@"): n for name, n in counters.items()}
    client.xadd("lisa:{orders}:history", fields, id=f"{ms}-0")


def found_history(cast: Cast, now_ms: int = NOW) -> list[Interval]:
    found = history.history(cast.store, "orders", HistorySpan.HOUR, now_ms=now_ms)
    return list(cast.store.drive(found))


def test_history_is_the_difference_of_samples(cast: Cast, client: redis.Redis) -> None:
    first = NOW // MINUTE * MINUTE - 3 * MINUTE
    sample(client, first, sent=10, acked_at_lisa=5)
    sample(client, first + MINUTE, sent=70, acked_at_lisa=65)
    # In a minute without a sample, nothing changed.
    client.hset("lisa:{orders}:stats", mapping={"sent": 100, "acked@lisa": 95, "late:e@lisa": 4})
    new, *found = found_history(cast)
    # A new topic had counted up to its first sample, perhaps not at an even pace.
    assert (new.start_ms, new.rise("sent"), new.is_first) == (first - MINUTE, 10, True)
    assert [(one.start_ms, one.counters.get("sent", 0)) for one in found] == [
        (first, 60),
        (first + MINUTE, 0),
        (first + 2 * MINUTE, 0),
        (first + 3 * MINUTE, 30),
    ]
    assert found[0].per_s("sent") == 1.0
    assert found[0].per_s("acked", "lisa") == found[0].per_s("acked") == 1.0
    assert found[-1].seconds == 30
    assert found[0].lateness_ms(0.99) is None
    assert 1.5 < (found[-1].lateness_ms(0.5) or 0) <= 2
    assert history.best_pace(found, "lisa") == 1.0
    assert history.best_pace(found, "other") is None
    # Half a second later in a minute that no manager has sampled yet.
    client.delete("lisa:{orders}:history", "lisa:{orders}:stats")
    begun = NOW // MINUTE * MINUTE
    sample(client, begun - 2 * MINUTE, acked_at_lisa=0)
    sample(client, begun - MINUTE, acked_at_lisa=60)
    client.hset("lisa:{orders}:stats", mapping={"acked@lisa": 121})
    found = found_history(cast, begun + 500)
    assert [(one.seconds, one.is_first) for one in found] == [
        (60, True),
        (60, False),
        (60.5, False),
    ]
    assert history.best_pace(found, "lisa") == pytest.approx(1.0, abs=0.02)


def test_a_server_that_came_back_empty_makes_no_negative_rates(
    cast: Cast, client: redis.Redis
) -> None:
    assert found_history(cast) == []  # before the first sample, nothing is made up
    sample(client, NOW // MINUTE * MINUTE - MINUTE, sent=1000)
    client.hset("lisa:{orders}:stats", "sent", 3)
    assert all(one.per_s("sent") >= 0 for one in found_history(cast))


def test_bands_count_each_message_once(cast: Cast, client: redis.Redis) -> None:
    dues = [NOW - 1, NOW, NOW + 1, NOW + 1_000, NOW + 1_001, NOW + 10 * 86_400_000, 10**15]
    client.zadd("lisa:{orders}:g:lisa:retry", {"again": NOW - 5, "later": NOW + 20_000})
    client.zadd("lisa:{orders}:waiting", {f"m{i}": due for i, due in enumerate(dues)})
    found = cast.store.drive(history.bands(cast.store, "orders", now_ms=NOW))
    filled = {(one.from_ms, one.to_ms): one.messages for one in found if one.messages}
    assert filled == {
        (None, 0): 3,
        (0, 1_000): 2,
        (1_000, 5_000): 1,
        (10_000, 30_000): 1,
        (604_800_000, 2_592_000_000): 1,
        (2_592_000_000, None): 1,
    }


@pytest.mark.parametrize("horizon", list(Horizon))
def test_due_messages_are_counted_for_each_group(
    cast: Cast, client: redis.Redis, horizon: Horizon
) -> None:
    client.hset("lisa:{orders}:groups", "other", "1")
    step = horizon.step_ms
    client.zadd(
        "lisa:{orders}:waiting", {"past": NOW - 5, "a": NOW + 1, "b": NOW + step, "c": 10**15}
    )
    client.zadd("lisa:{orders}:g:other:retry", {"r": NOW + 1, "old": NOW - 1})
    groups = cast.store.drive(history.due(cast.store, "orders", horizon, now_ms=NOW))
    lisa, other = sorted(groups, key=lambda one: one.group)
    assert (lisa.group, lisa.backlog, lisa.beyond) == ("lisa", 1, 1)
    assert (other.group, other.backlog, other.beyond) == ("other", 2, 1)
    assert len(lisa.steps) == horizon.count
    assert [one.due for one in lisa.steps[:3]] == [1, 1, 0]
    assert [one.due for one in other.steps[:3]] == [2, 1, 0]
    assert lisa.steps[0].start_ms == NOW
    assert all(one.end_ms % step == 0 for one in lisa.steps)


def steps(*counts: int) -> tuple[ForecastStep, ...]:
    return tuple(ForecastStep(i * MINUTE, (i + 1) * MINUTE, n) for i, n in enumerate(counts))


def test_the_outlook_warns_where_more_falls_due_than_was_handled() -> None:
    def outlook(backlog: int, counts: tuple[int, ...], pace: float | None) -> Outlook:
        ahead = Outlook(group="g", backlog=backlog, steps=steps(*counts), beyond=0)
        return history.outlook(ahead, pace)

    seen = outlook(0, (30, 160, 70, 10, 0), 1.0)
    assert [one.left for one in seen.steps] == [0, 100, 110, 60, 0]
    assert (seen.crossing_ms, seen.most, seen.clear_ms) == (MINUTE, 110, 5 * MINUTE)
    never = outlook(1_000, (60, 60), 1.0)
    assert (never.crossing_ms, never.most, never.clear_ms) == (0, 1_000, None)
    again = outlook(0, (100, 0, 1_000, 0), 1.0)
    assert (again.crossing_ms, again.most, again.clear_ms) == (0, 940, None)
    shrinking = outlook(10_000, (0, 0), 100.0)
    assert (shrinking.crossing_ms, shrinking.most, shrinking.clear_ms) == (0, 10_000, 100_000)
    assert outlook(0, (60, 60, 60), 1.0).crossing_ms is None
    assert outlook(0, (65, 0, 0), 1.0).crossing_ms is None
    assert outlook(0, (9, 0), 0.001).crossing_ms is None
    assert outlook(500, (900, 900), None).crossing_ms is None


def test_a_burst_of_a_moment_is_no_pace() -> None:
    day, moment = Interval(0, 60 * MINUTE, {"acked@g": 3_600}), Interval(0, 5, {"acked@g": 50})
    assert history.best_pace([day, moment], "g") == 1.0
    assert history.best_pace([Interval(0, MINUTE, {"acked@g": 60})], "g") == 1.0
    assert history.best_pace([], "g") is None
    slow, fast = Interval(0, MINUTE, {"acked@g": 60}), Interval(0, MINUTE, {"acked@g": 600})
    assert history.best_pace([slow, fast, slow], "g") == 10.0


@pytest.mark.parametrize("depth", [50, 400, 30_000])
def test_json_that_is_nested_deeply_stays_readable_and_small(depth: int) -> None:
    data = b"[" * depth + b",".join([b"1"] * 2_000) + b"]" * depth
    one = shown("j", data, most=64 * 1024)
    assert one.kind == "JSON"
    assert len(one.text) <= 4 * len(data)
    assert one.text.replace("\n", "").replace(" ", "") == data[: 64 * 1024].decode()


def journaled(client: redis.Redis, redis_url: str, n: int, body: object = 1) -> list[str]:
    client.hset("lisa:{orders}:options", "journal", "1")
    with Producer(redis_url) as producer:
        report = producer.send_many("orders", [body] * n, delay=timedelta(hours=1))
        return [one.id for one in report]


def test_a_story_is_read_backwards_in_pages(
    cast: Cast, client: redis.Redis, redis_url: str
) -> None:
    ids = journaled(client, redis_url, 1_000)

    def read(cursor: str | None) -> story.Story:
        return cast.store.drive(
            story.read_back(cast.store, "orders", ids[0], cursor=cursor, most=400)
        )

    looks, cursor = [read(None)], None
    while (cursor := looks[-1].cursor) is not None:
        looks.append(read(cursor))
    assert [look.looked for look in looks] == [400, 400, 200]
    assert [len(look.events) for look in looks] == [0, 0, 1]
    (event,) = looks[-1].events
    assert (event.state, event.number, event.group, event.ends) == ("sent", 1, None, False)
    assert event.actor.startswith("producer@")
    with pytest.raises(ValueError, match="is not the id of a stream entry"):
        read("nonsense")
    later = story.read_back(cast.store, "orders", ids[0], not_before_ms=now_ms() + MINUTE)
    read_later = cast.store.drive(later)
    assert (read_later.looked, read_later.cursor) == (0, None)
    # Near a known instant, an event is found at once.
    at = id_time_ms(ids[250])
    assert at is not None
    near = cast.store.drive(story.around(cast.store, "orders", ids[250], [at]))
    assert [event.state for event in near] == ["sent"]
    assert cast.store.drive(story.around(cast.store, "orders", ids[250], [at - HOUR])) == []


def test_large_bodies_make_small_pages(cast: Cast, client: redis.Redis, redis_url: str) -> None:
    ids = journaled(client, redis_url, 120, "x" * 200_000)
    before = client.info("stats")["total_net_output_bytes"]
    read = cast.store.drive(story.read_back(cast.store, "orders", ids[-1], most=110))
    assert read.looked == 110
    assert read.cursor is not None
    assert client.info("stats")["total_net_output_bytes"] - before < 30_000_000


def test_previews_are_truncated_and_faults_reported(
    cast: Cast, client: redis.Redis, redis_url: str
) -> None:
    with Producer(redis_url) as producer:
        producer.send("orders", "y" * 50_000, id="long", delay=timedelta(hours=1))
        producer.send("orders", {"a": 1}, id="short", delay=timedelta(hours=1))
    client.set("lisa:{orders}:body:broken", "9nonsense")
    found: Any = cast.store.drive(
        story.previews(cast.store, "orders", ["long", "short", "broken", "gone"], 1_000)
    )
    long, short, broken, gone = found
    assert (len(long.envelope.body), long.whole, short.whole) == (1_000, False, True)
    assert broken.envelope is None
    assert "version" in broken.fault
    assert gone is None
    assert shown(long.envelope.kind, long.envelope.body, most=1_000, whole=False).more


def test_generated_ids_contain_their_creation_time() -> None:
    before = now_ms()
    made = [new_id(), *new_ids(100)]
    after = now_ms()
    for one in made:
        assert before <= (id_time_ms(one) or 0) <= after
    for one in ("order-43", "x" * 22, "0" * 22, "é" * 22, "", made[0] + "x", made[0] + "\n"):
        assert id_time_ms(one) is None


def test_counts_and_spans_are_short() -> None:
    counts = {None: DASH, 0: "0", 99_999: "99,999", 100_000: "100k", 999_499: "999k"}
    counts |= {999_500: "1.0M", 12_345_678: "12.3M", 2_500_000_000: "2.5G"}
    assert {value: count(value) for value in counts} == counts
    spans = {None: DASH, 0.24: "0.2 ms", 43.4: "43 ms", 1_000: "1 s", 1_500: "1.5 s"}
    spans |= {90_000: "1 m 30 s", 86_400_000: "1 d"}
    assert {value: span(value) for value in spans} == spans


def test_links_survive_any_id() -> None:
    assert message_link("a", "x/../y?z#%") == "/topics/a/messages/x%2F..%2Fy%3Fz%23%25"
    assert message_link("a", "..") == "/topics/a/message?id=.."
