"""The world of a torture run: its topics, message behaviour, and number formats."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

ACK_S = 3.0
"""The ack timeout of every topic; all bounds of a run are multiples of it."""

HANG_TIMEOUT_S = 2.0
RETENTION_S = 60.0
RETRY_DELAY_MS = 200
RETRIES = 200  # faults alone must never use up a message's attempts
RETRY_AFTER_MS = 100
DEFER_UNTIL = 3
POISON_RETRIES = 2
ANSWERS_OF_TROUBLE = (0, 408, 502, 503, 504)
"""HTTP status codes allowed while a server or a client fails. 0: no response."""

MOST_GROUPS = 4

FOREIGN = {
    "trim": {"entry-lost", "pending-lost"},
    "delete-bodies": {"no-body", "leftover"},
    "delete-consumer": {"entry-lost"},
    "destroy-group": {"entry-lost", "no-stream"},
}
"""Damage by other programs that an operator repairs with fsck: the findings it may cause."""


class Topic(NamedTuple):
    """One topic and its groups."""

    name: str
    groups: tuple[str, ...]


NAMES = (
    "bulk",
    "two",
    "batch",
    "async",
    "hard",
    "hang",
    "fickle",
    "http",
    "windows",
    "ordered",
    "limited",
    "coalesced",
)
GROUPS = {"two": ("east", "west")}
TOPICS = [Topic(name, GROUPS.get(name, ("lisa",))) for name in NAMES]
"""Ledgers identify a topic by its number here."""

WINDOWED = "windows"
"""The topic of messages with windows, described below."""

ORDERED, LIMITED, COALESCED = "ordered", "limited", "coalesced"
"""The topics of messages with keys. A key is used by one sender, which sends one call after the
other for it."""

LANES: Mapping[str, Mapping[str, Any]] = {
    ORDERED: {"order": "continue"},
    LIMITED: {"concurrency": 6, "key-concurrency": 2, "key-rate": "20/s, burst 5", "fair": True},
    COALESCED: {},
}
"""Their options of lanes."""

AT_ONCE = {ORDERED: 1, LIMITED: 2, COALESCED: 1}
"""How many messages of a key may be in flight in a group."""

RULES: Sequence[tuple[int, Mapping[str, Any]]] = (
    (1_000, {"debounce": "1s"}),
    (1_000, {"debounce": "1s", "max_wait": "3s"}),
    (2_000, {"throttle": "2s"}),
    (1_000, {"latest": True, "delay": "1s"}),
)
"""How the sends of a key coalesce, by the key's remainder: when a message is due at the latest, in
ms after the send, and the options."""

TICKS = "ticks"
"""The topic of schedules. No consumer handles it, so every occurrence can be counted at the end."""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "ahead": {"every": "1s", "start": "2026-01-01T00:00", "catch_up": "all"},
    "at-tick": {"every": "1s", "start": "2026-01-01T00:00", "catch_up": "all", "max_late": "1h"},
    "cron": {"cron": "*/2 * * * * *", "tz": "Europe/Berlin", "catch_up": "all"},
}


class Do(IntEnum):
    """How a handler must treat a message; the message's body says so."""

    OK = 0
    RAISE = 1  # on the first two attempts
    RETRY = 2  # once, with a delay of its own
    FALSE = 3  # once
    DISCARD = 4
    POISON = 5  # raises until its two retries are used up
    SLOW = 6
    SLOWER = 7  # longer than the ack timeout
    HANG = 8  # longer than the handler's timeout, on the first attempt
    DEFER = 9  # until a delivery's due time is a multiple of DEFER_UNTIL


class Verdict(IntEnum):
    """How a handling ended. BEGUN: its end is unknown."""

    BEGUN = 0
    OK = 1
    FAILED = 2
    DISCARDED = 3
    DEFERRED = 4


def pause_ms(do: int) -> int:
    """The minimum pause of a failed or deferred message before its next delivery."""
    return RETRY_AFTER_MS if do in (Do.RETRY, Do.POISON, Do.DEFER) else RETRY_DELAY_MS


def topic_number(name: str) -> int:
    return NAMES.index(name)


def place_number(topic: str, group: str) -> int:
    """The number of a topic's group: a message is to be handled once in each."""
    number = topic_number(topic)
    return number * MOST_GROUPS + TOPICS[number].groups.index(group)


def number_of(sender: int, count: int) -> int:
    """A message's number: its sender and its count."""
    return (sender << 32) + count


def key_of(number: int, key: int) -> str:
    """The key of a message, by the number of the key at its sender."""
    return f"{number >> 32}-{key}"


def may_be_due_before(key: int) -> bool:
    """Whether a coalesced send of a key may leave an earlier due time as it is."""
    return set(RULES[key % len(RULES)][1]) != {"debounce"}


def own_id(number: int) -> str:
    return f"{number >> 32}-{number & 0xFFFFFFFF}"


LARGE = (5_000, 20_000, 100_000, 300_000)
LARGE_EVERY, LARGE_TOGETHER = 1_000, 4


def body_of(number: int, do: int) -> list[int | str]:
    """The body of a message. Some are large, a few in a row: calls stop at their byte budget."""
    if number % LARGE_EVERY >= LARGE_TOGETHER:
        return [number, do]
    return [number, do, "x" * LARGE[number // LARGE_EVERY % len(LARGE)]]


def manager_config(*journaled: str, is_current: bool) -> str:
    """The configuration of all managers, JSON as YAML: it declares the topics.

    journaled: the topics with a journal. is_current: all roles know windows and lanes.
    """
    ack_ms = timedelta(seconds=ACK_S) // timedelta(milliseconds=1)
    retry = {"fixed": {"delay": f"{RETRY_DELAY_MS}ms", "count": RETRIES}}
    groups: list[dict[str, Any]] = _groups([topic.name for topic in TOPICS])
    for group in groups:
        group["retention"] = f"{RETENTION_S:g}s"
        if group["topic"] in journaled:
            group["journal"] = True
        if is_current:
            group.update(LANES.get(group["topic"], {}))
        if is_current and group["topic"] == WINDOWED:
            group["window"] = topic_window()
    server = {"timeout": f"{ack_ms}ms", "retry": retry}
    return json.dumps({"lisa-delay-queue": {"manager-server": server, "groups": groups}})


def consumer_config(topics: Sequence[str]) -> str:
    """The configuration of a consumer: every group of its topics."""
    server = {"consumer-server": {"grace": "10s"}, "groups": _groups(topics)}
    return json.dumps({"lisa-delay-queue": server})


def _groups(names: Sequence[str]) -> list[dict[str, Any]]:
    topics = [topic for topic in TOPICS if topic.name in names]
    return [{"topic": topic.name, "group": group} for topic in topics for group in topic.groups]


# Windows: messages with even numbers are open in even minutes: by the window of the topic, in a
# zone that their header names. Those with odd numbers are open in odd minutes, by windows of
# their own.

MINUTE_MS = 60_000
"""How long each window is open, and then closed: windows count in minutes."""

SPANS = 38
"""As many minutes as fit into the text of a window; the topic's begin at noon."""

CLOSES_WITHIN_MS, SHORTLY_MS = 8_000, 200

NOON = 12 * 60
DAY = 24 * 60


def topic_window() -> str:
    """The window of the topic: even minutes after noon, in the zone of the header `zone`."""
    return f"{_text(range(NOON, NOON + 2 * SPANS, 2))}; tz=@zone|UTC"


def options_of(number: int, now_ms: int) -> dict[str, Any]:
    """The options with which a message is sent."""
    minute = now_ms // MINUTE_MS % DAY
    if number % 2 == 0:  # somewhere, it is between noon and one
        return {"headers": {"zone": f"{12 - minute // 60:+03}:00"}}
    first = minute + 1 - minute % 2
    return {"window": _text(one % DAY for one in range(first, first + 2 * SPANS, 2)), "tz": "UTC"}


def _text(minutes: Iterable[int]) -> str:
    return ",".join(f"{m // 60}:{m % 60:02}-{(m + 1) // 60}:{(m + 1) % 60:02}" for m in minutes)


def is_open(number: int, at_us: int) -> bool:
    """Whether a message may be handed over at an instant."""
    return at_us // 1000 // MINUTE_MS % 2 == number % 2


def opening(number: int, at_ms: int) -> int:
    """When a message may be handed over next, in ms."""
    return at_ms if is_open(number, at_ms * 1000) else (at_ms // MINUTE_MS + 1) * MINUTE_MS


def has_time_in_its_window(number: int, now_ms: int, delay_ms: int, waits_ms: float) -> bool:
    """Whether a message can be handled within this time: in a short run, none waits a minute."""
    begins_ms = opening(number, now_ms + delay_ms)
    ends_ms = (begins_ms // MINUTE_MS + 1) * MINUTE_MS
    return waits_ms >= MINUTE_MS or begins_ms - now_ms <= waits_ms <= ends_ms - begins_ms


def shortly_before_it_closes(number: int, now_ms: int, delay_ms: int) -> int:
    """A delay to right before the window of a message closes, if it is open until then.

    Its delivery must then be deferred, unless its handler starts at once.
    """
    left_ms = MINUTE_MS - now_ms % MINUTE_MS
    if not is_open(number, now_ms * 1000) or left_ms > CLOSES_WITHIN_MS:
        return delay_ms
    return max(0, left_ms - delay_ms % SHORTLY_MS)
