"""Searches live messages by a prefix of their id, or by text in headers and body.

There is no index: each call looks at a limited number of messages, for a limited time, and returns
a cursor for the next call. The archive is searched by `lisa pipeline search`.
"""

from __future__ import annotations

import base64
import json
import re
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lisa.admin.messages import LiveState, MessageSource, candidates
from lisa.admin.reading import shards
from lisa.admin.story import Preview, previews
from lisa.core.model.display import visible
from lisa.core.model.envelope import Envelope
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import keyed_id
from lisa.core.model.sharding import KEY_END, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import text

STEP = 200
"""Messages that are read at once."""

TEXT_STEP = 50
"""The same for a search of bodies."""

TOPICS_PER_STEP = 250

BODY_BYTES = 64 * 1024
"""Only the beginning of a body is searched: as much as the web page shows."""

BESIDE = r"\s*([{}\[\],:])\s*"
"""JSON's punctuation, with the spaces that an indented body has beside it."""

_SPACES = re.compile(f"{BESIDE}|\\s+")
_ESCAPE = re.compile(
    r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})|([\"\\/bfnrt]))",
    re.IGNORECASE,
)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"[0-9a-f]{2}(?:\s+[0-9a-f]{2})+|(?:[0-9a-f]{2}){4,}", re.IGNORECASE)
_DUMPED = re.compile(r"[0-9a-f]{6}  ((?:[0-9a-f]{2} ){1,16}) ")
"""The bytes in a line of a hex dump."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]{4,}={0,2}")
_PART_OF_BASE64 = 12
"""A base64 text of this length may be a part, which begins and ends at any character."""


class WantedText:
    """A text to search for, as somebody types it or copies it from where a body is displayed.

    Ignored are case, the spaces beside JSON's punctuation, and whether characters are escaped. A
    binary body is found by its bytes in hexadecimal or base64 as well.

    plain: the text in the form in which it is compared. binary: the bytes that it may stand for.
    """

    def __init__(self, text: str) -> None:
        self._has_spaces = _SPACES.search(text) is not None or "\\" in text
        self.plain = self._folded(text).strip()
        self.binary = tuple(_bytes_in(text.strip()))

    def is_in(self, text: str) -> bool:
        """Whether a text contains it."""
        return self.plain in self._folded(text)

    def is_in_body(self, envelope: Envelope) -> bool:
        """Whether a body contains it."""
        if envelope.kind == "b" and any(part in envelope.body for part in self.binary):
            return True
        return self.is_in(envelope.body.decode("utf-8", "replace"))

    def _folded(self, text: str) -> str:
        if "\\" in text:
            text = unescaped(text)
        if self._has_spaces:
            text = _SPACES.sub(lambda match: match[1] or " ", text)
        return text.lower() if text.isascii() else unicodedata.normalize("NFC", text).casefold()


def unescaped(text: str) -> str:
    """A text in which the escapes of JSON are replaced by their characters."""
    return _ESCAPE.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    high, low, code, letter = match.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    return chr(int(code, 16)) if code else _ESCAPED.get(letter, letter)


def _bytes_in(text: str) -> Iterator[bytes]:
    if _HEX.fullmatch(text):
        yield bytes.fromhex(text)
    if dumped := _DUMPED.findall(text):
        yield bytes.fromhex("".join(dumped))
    if _BASE64.fullmatch(text):
        if len(text) % 4 == 0:
            yield base64.b64decode(text)
        digits = text.rstrip("=")
        for first in range(4 if len(digits) >= _PART_OF_BASE64 else 0):
            yield base64.b64decode(digits[first : first + (len(digits) - first) // 4 * 4])


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A message that matches. `where`: the part that matches, such as `body` or `header x`."""

    topic: str
    id: str
    state: LiveState
    group: str
    where: str


@dataclass(frozen=True, slots=True)
class SearchPage:
    """The result of one call.

    looked: number of messages that were examined; `topic` and `state` were the last ones.
    cursor: where the next call continues; None at the end.
    """

    hits: tuple[SearchHit, ...]
    looked: int
    topic: str
    state: LiveState
    cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageQuery:
    """What to search for. in_text: in headers and body (see `WantedText`), not the id."""

    wanted: str
    in_text: bool = False


def search(
    store: Store,
    topics: Sequence[str],
    query: MessageQuery,
    *,
    cursor: str | None = None,
    most: int = 20_000,
    most_hits: int = 50,
    within_s: float = 1.5,
) -> Flow[SearchPage]:
    """Search topics in the order of their names.

    Ends after `most` messages, `most_hits` hits or `within_s` seconds, but not within a step.
    Raises ConfigError for an invalid cursor, and LisaError.
    """
    start = _read_cursor(cursor)
    ends, looked = time.monotonic() + within_s, 0
    text_wanted = WantedText(query.wanted) if query.in_text else None
    step = TEXT_STEP if query.in_text else STEP
    hits: dict[tuple[str, str], SearchHit] = {}
    last = ("", LiveState.WAITING)
    for topic in sorted(topics):
        if start and topic < start[0]:
            continue
        for source in (yield from _sources(store, topic, start)):
            position: str | None = start[-1] if start and start[:4] == _name(topic, source) else ""
            last = (topic, source.state)
            while position is not None:
                if looked >= most or len(hits) >= most_hits or time.monotonic() >= ends:
                    here = json.dumps([*_name(topic, source), position])
                    return SearchPage(tuple(hits.values()), looked, *last, here)
                try:
                    found, position = yield from candidates(store, source, position, step)
                except ValueError:
                    raise _unknown_cursor(cursor) from None
                looked += len(found)
                ids = [text(message.id) for message in found if message.id]
                for message_id, where in (
                    yield from _matching(store, topic, ids, query, text_wanted)
                ):
                    hit = SearchHit(topic, message_id, source.state, source.group, where)
                    hits.setdefault((topic, message_id), hit)
    return SearchPage(tuple(hits.values()), looked, *last, None)


def _name(topic: str, source: MessageSource) -> list[str]:
    return [topic, source.shard, str(source.state), source.group]


def _read_cursor(cursor: str | None) -> list[str] | None:
    if cursor is None:
        return None
    try:
        start = json.loads(cursor)
    except (ValueError, RecursionError):
        start = None
    if not (isinstance(start, list) and len(start) == 5 and all(isinstance(x, str) for x in start)):
        raise _unknown_cursor(cursor)
    return start


def _unknown_cursor(cursor: str | None) -> ConfigError:
    return ConfigError(f"{(cursor or '')[:80]!r} is not a cursor of this search; omit it")


def _sources(store: Store, topic: str, start: list[str] | None) -> Flow[list[MessageSource]]:
    """Where live messages of a topic may be, from the cursor's place on."""
    groups = yield from store.groups(topic)
    found = []
    for shard in (yield from shards(store, topic)):
        found.append(MessageSource(shard, "", LiveState.WAITING, None))
        for state in (LiveState.READY, LiveState.IN_FLIGHT, LiveState.RETRY, LiveState.GARBAGE):
            found += [MessageSource(shard, group, state, None) for group in groups]
    places = [_name(topic, found_at) for found_at in found]
    if start and start[:4] in places:  # else the group or shard is gone, or it is another topic
        return found[places.index(start[:4]) :]
    return found


def _matching(
    store: Store, topic: str, ids: Sequence[str], query: MessageQuery, wanted: WantedText | None
) -> Flow[list[tuple[str, str]]]:
    """The ids that match, and the part that matches."""
    if wanted is None:
        start = query.wanted  # as it is, or as pages show it
        found_ids = [
            message_id
            for message_id in ids
            if message_id.startswith(start) or visible(message_id).startswith(start)
        ]
        return [(message_id, "id") for message_id in found_ids]
    found = yield from previews(store, topic, ids, BODY_BYTES)
    return [
        (message_id, where)
        for message_id, preview in zip(ids, found, strict=True)
        if (where := _part(preview, wanted))
    ]


def _part(preview: Preview | None, wanted: WantedText) -> str:
    """The part of a message that contains a text; empty if none does."""
    if preview is None or preview.envelope is None:
        return ""
    for name, value in preview.envelope.headers.items():
        if wanted.is_in(name) or wanted.is_in(value):
            return f"header {name}"
    return "body" if wanted.is_in_body(preview.envelope) else ""


def topics_with_key(store: Store, topics: Sequence[str], key: str) -> Flow[list[str]]:
    """The topics that have live messages of a key, in the given order."""
    found: list[str] = []
    for part in chunks(list(map(Topic, topics)), TOPICS_PER_STEP):
        layouts = yield from store.layouts(part)
        asked = [
            (topic, store.keys.topic(shard).keyed)
            for topic, layout in zip(part, layouts, strict=True)
            for shard in layout.shards_of_id(topic, keyed_id(key, ""))
        ]
        replies = yield from store.commands(
            [("HMGET", keyed, key, f"{key}{KEY_END}") for _, keyed in asked]
        )
        found += [topic for (topic, _), known in zip(asked, replies, strict=True) if any(known)]
    return list(dict.fromkeys(found))


def topics_with(store: Store, topics: Sequence[str], message_id: str) -> Flow[list[str]]:
    """The topics that have a message or a tombstone with an id, in the given order."""
    found: list[str] = []
    for part in chunks(list(map(Topic, topics)), TOPICS_PER_STEP):
        layouts = yield from store.layouts(part)
        asked = [
            (topic, key(message_id))
            for topic, layout in zip(part, layouts, strict=True)
            for keys in map(store.keys.topic, layout.shards_of_id(topic, message_id))
            for key in (keys.body, keys.done)
        ]
        replies = yield from store.commands([("EXISTS", key) for _, key in asked])
        found += [topic for (topic, _), known in zip(asked, replies, strict=True) if known]
    return list(dict.fromkeys(found))
