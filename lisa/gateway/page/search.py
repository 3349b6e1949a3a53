"""The search for messages: by id in all topics at once, by a prefix or by text with a cursor.

Searches live messages, or the archive if the gateway knows one: the table `messages` of an archive
in files, newest day first, without Spark. Each call stops after some hits or seconds, and returns a
cursor for the next call.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any

from starlette.responses import RedirectResponse, Response

from lisa.admin import search
from lisa.admin.search import BESIDE, MessageQuery, SearchPage, WantedText, unescaped
from lisa.core.model.clock import datetime_ms
from lisa.core.model.display import visible
from lisa.core.model.errors import ConfigError
from lisa.core.model.extras import requires
from lisa.core.model.keys import SHOWN_END, check_id, check_topic, keyed_id
from lisa.core.model.sharding import KEY_END
from lisa.core.store.inspection import found
from lisa.gateway.page.rendering import Body, format_body, key_link, message_link
from lisa.gateway.page.visits import PageRequest

MOST_HITS = 50
WITHIN_S = 2.0
BODY_BYTES = 32 * 1024
"""Larger bodies are not shown."""

_LIVE = "live"
"""The day, in a cursor, of messages that had not ended when the table was written."""

_NOT_ASCII = re.compile(r"[^\0-\x7f]")
_COLUMNS = "topic, id, state, attempts, due, sent_at, settled_at, reason, headers, kind"

MOST_TOPICS = 2_000
MOST_IDS = 20_000
MOST_BODIES = 2_000
"""Messages that one request examines at most, in a search by id and by text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveQuery(MessageQuery):
    """What to search for, and in which topic; None: in all."""

    topic: str | None = None


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """A row of the table. `body` is None if it is larger than BODY_BYTES, or unknown."""

    topic: str
    id: str
    state: str
    attempts: int
    due_ms: int | None
    sent_ms: int | None
    settled_ms: int | None
    reason: str | None
    headers: Mapping[str, str]
    body: Body | None
    body_bytes: int | None


@dataclass(frozen=True, slots=True)
class ArchivePage:
    """The result of one call.

    written_ms: when the table was written. day: the last day that was searched, None for messages
    that had not ended. cursor: where the next call continues; None at the end.
    """

    hits: tuple[ArchivedMessage, ...]
    written_ms: int
    day: date | None
    cursor: str | None


def search_archive(
    archive: str | Path,
    query: ArchiveQuery,
    *,
    sees: Callable[[str], bool],
    cursor: str | None = None,
    most: int = MOST_HITS,
    within_s: float = WITHIN_S,
) -> ArchivePage:
    """Search an archive; `sees` tells which topics may be shown. Blocks the thread.

    An id is first searched for in all days at once, and then, as a prefix, day by day. Raises
    ConfigError if the archive or the package `deltalake` is missing, for an unknown cursor, or if
    the store of the archive does not answer.
    """
    with _reading(archive):
        table = _Table(str(archive))
        ends, hits = time.monotonic() + within_s, list[ArchivedMessage]()
        start, skipped = _position(cursor)
        if cursor is None and not query.in_text:
            hits += table.rows([*_topic(query), f"id = {_text(query.wanted)}"], most, 0)
        days = table.days()
        if cursor is not None:
            days = [day for day in days if _order(day) <= _order(start)]
        day, following = None, None
        conditions = _topic(query) + _matches(query)
        for index, day in enumerate(days):
            found = list(table.rows([_on(day), *conditions], most, skipped if day == start else 0))
            hits += found
            if len(found) == most:
                following = f"{day or _LIVE}:{(skipped if day == start else 0) + most}"
                break
            is_over = len(hits) >= most or time.monotonic() > ends
            if is_over and index + 1 < len(days):
                following = f"{days[index + 1] or _LIVE}:0"
                break
        seen = tuple(hit for hit in hits if sees(hit.topic))
        return ArchivePage(seen, table.written_ms, day, following)


@contextmanager
def _reading(archive: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # delta-rs tells the cause last, on a line of its own
        reason = str(error).strip().rpartition("\n")[2].rpartition("\x1b[0m ")[2]
        raise ConfigError(f"the archive {archive} cannot be read: {reason}") from error


class _Table:
    """The current version of the table `messages`."""

    def __init__(self, archive: str) -> None:
        with requires("archive"):
            from deltalake import DeltaTable, QueryBuilder
            from deltalake.exceptions import DeltaError, TableNotFoundError
        try:
            table = DeltaTable(f"{archive}/messages", storage_options=_store_options(archive))
        except TableNotFoundError:
            raise ConfigError(f"there is no archive in {archive}") from None
        except DeltaError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"the archive {archive} cannot be read: {reason}") from None
        if not table.history(1):  # delta-rs ignores a commit without content
            raise ConfigError(
                f"the archive {archive} cannot be read: the last commit in messages/_delta_log is "
                "empty; `lisa pipeline archive` says what to do"
            )
        self._files = table.get_add_actions(flatten=True)
        self._sql = QueryBuilder().register("messages", table)
        self.written_ms = max(self._files.column("modification_time").to_pylist(), default=0)

    def days(self) -> list[date | None]:
        """The days with rows, newest first; None, for rows without a day, comes first."""
        found = set(self._files.column("partition.day").to_pylist())
        return sorted(found, key=_order, reverse=True)

    def rows(self, conditions: list[str], most: int, skipped: int) -> Iterator[ArchivedMessage]:
        """The rows that meet all conditions, in a fixed order."""
        # Only what `_text` has quoted comes from outside. The size of a binary value can only be
        # had by converting it, which the outer query does for the rows that are returned.
        found = self._sql.execute(
            f"SELECT {_COLUMNS}, body_bytes, "  # noqa: S608
            f"CASE WHEN body_bytes <= {BODY_BYTES} THEN body END AS body FROM ("
            f"SELECT {_COLUMNS}, body, octet_length(encode(body, 'hex')) / 2 AS body_bytes "
            f"FROM (SELECT * FROM messages WHERE {' AND '.join(conditions)} "
            f"ORDER BY updated_at DESC, topic, id, token LIMIT {most} OFFSET {skipped}))"
        ).read_all()
        columns = [found.column(name).to_pylist() for name in found.schema.names]
        for row in zip(*columns, strict=True):
            yield _message(dict(zip(found.schema.names, row, strict=True)))


def _store_options(archive: str) -> dict[str, str] | None:
    """Settings of delta-rs for S3, besides those that it reads from the environment (AWS_...)."""
    if not archive.startswith("s3:"):
        return None
    options = {"max_retries": "2", "retry_timeout": "5s", "connect_timeout": "3s", "timeout": "10s"}
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http:"):
        options["AWS_ALLOW_HTTP"] = "true"
    return options


def _message(row: dict[str, Any]) -> ArchivedMessage:
    kind, data = row.pop("kind"), row.pop("body")
    row |= {"headers": dict(row["headers"] or {}), "body": None}
    if data is not None:
        row["body"] = format_body(kind or "b", bytes(data), most=BODY_BYTES)
    for name in ("due", "sent_at", "settled_at"):
        at: datetime | None = row.pop(name)
        row[f"{name.removesuffix('_at')}_ms"] = None if at is None else datetime_ms(at)
    return ArchivedMessage(**row)


def _topic(query: ArchiveQuery) -> list[str]:
    return [] if query.topic is None else [f"topic = {_text(query.topic)}"]


def _matches(query: ArchiveQuery) -> list[str]:
    if not query.in_text:
        wanted = _text(query.wanted)
        return [f"starts_with(id, {wanted})", f"id <> {wanted}"]
    names, values = (f"array_to_string(map_{part}(headers), ' ')" for part in ("keys", "values"))
    found = []
    for text in (names, values, "TRY_CAST(body AS VARCHAR)"):
        folded = f"lower(regexp_replace({text}, {_text(BESIDE)}, '\\1', 'g'))"
        found += [f"contains({folded}, lower({_text(form)}))" for form in _forms(query.wanted)]
    for bytes_ in WantedText(query.wanted).binary:
        found.append(f"(kind = 'b' AND contains(encode(body, 'hex'), {_text(bytes_.hex())}))")
    return [f"({' OR '.join(found)})"]


def _forms(wanted: str) -> list[str]:
    """A text as it may be stored: with and without the escapes of JSON."""
    plain = unescaped(wanted)
    quoted = [json.dumps(plain, ensure_ascii=escaped)[1:-1] for escaped in (True, False)]
    unquoted = re.sub(r"(?:\\u[0-9a-fA-F]{4})+", lambda match: unescaped(match[0]), wanted)
    cases = (wanted, wanted.lower(), wanted.upper())  # their escapes differ
    ascii_only = [
        _NOT_ASCII.sub(lambda character: json.dumps(character[0])[1:-1], each) for each in cases
    ]
    found = [wanted, unquoted, plain, *quoted, *ascii_only]
    return list(dict.fromkeys(re.sub(BESIDE, r"\1", form).strip() for form in found))


def _on(day: date | None) -> str:
    return "day IS NULL" if day is None else f"day = DATE '{day}'"


def _text(value: str) -> str:
    """A text literal of SQL, in which only the quote needs escaping."""
    return "'" + value.replace("'", "''") + "'"


def _order(day: date | None) -> date:
    return day or date.max


def _position(cursor: str | None) -> tuple[date | None, int]:
    """The day and the number of its rows that were returned before. Raises ConfigError."""
    if cursor is None:
        return None, 0
    day, _, skipped = cursor.partition(":")
    try:
        return None if day == _LIVE else date.fromisoformat(day), max(0, int(skipped))
    except ValueError:
        raise ConfigError(f"{cursor!r} is not a cursor of this search") from None


_archive_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")
"""Searches of the archive run one after the other, because each may use all cores."""


async def show(visit: PageRequest) -> Response:
    """Search one topic or all topics; a single message with the exact id redirects to its page."""
    wanted = visit.query.get("q", "").strip()
    in_text = visit.query.get("in") == "text"
    named, cursor = visit.query.get("topic") or None, visit.query.get("cursor")
    snapshot = await visit.snapshots.current()
    topics = [check_topic(named)] if named else list(snapshot.lines)
    topics = [topic for topic in topics if visit.token.sees(topic)]
    exact: list[str] = []
    keyed: list[str] = []
    found_id = wanted
    page: SearchPage | ArchivePage | None = None
    known = visit.gateway.settings.gateway_server.archive
    archive = known if visit.query.get("where") == "archive" else None
    if wanted and archive is not None:
        query = ArchiveQuery(wanted=wanted, in_text=in_text, topic=named)
        call = partial(search_archive, archive, query, sees=visit.token.sees, cursor=cursor)
        page = await asyncio.get_running_loop().run_in_executor(_archive_thread, call)
    elif wanted and not in_text and cursor is None:
        written = unescaped(wanted)  # as a page shows an id with hiding characters
        wanted = written if visible(written) == wanted else wanted
        for found_id in _ids(wanted):
            if exact := await _exact(visit, topics[:MOST_TOPICS], check_id(found_id)):
                break
        if KEY_END not in wanted:
            keyed = await visit.gateway.ask(search.topics_with_key, topics[:MOST_TOPICS], wanted)
        if len(exact) + len(keyed) == 1 and "in" not in visit.query:
            place = key_link(keyed[0], wanted) if keyed else message_link(exact[0], found_id)
            return RedirectResponse(place, 303)
    if wanted and archive is None:
        flow = search.search(
            visit.gateway.store,
            topics,
            MessageQuery(wanted=wanted, in_text=in_text),
            cursor=cursor,
            most=MOST_BODIES if in_text else MOST_IDS,
        )
        page = await visit.gateway.store.drive(flow)
    return visit.page(
        "search.html",
        wanted=wanted,
        in_text=in_text,
        has_archive=known is not None,
        in_archive=archive is not None,
        named=named,
        exact=exact,
        found_id=found_id,
        keyed=keyed,
        page=page,
        topics=len(topics),
        left_out=max(0, len(topics) - MOST_TOPICS),
        names=[topic for topic in snapshot.lines if visit.token.sees(topic)],
        body_kib=search.BODY_BYTES // 1024,
    )


def _ids(wanted: str) -> list[str]:
    """The ids that a text may stand for: itself, or as pages show that of a message with a key."""
    key, _, own_id = wanted.rpartition(SHOWN_END)
    return [wanted, keyed_id(key, own_id)] if key and own_id else [wanted]


async def _exact(visit: PageRequest, topics: list[str], message_id: str) -> list[str]:
    """The topics that have a message with this id. Raises LisaError."""
    look = partial(visit.gateway.settler.look, message_id=message_id, bodies=False)
    return [
        topic
        for topic in await visit.gateway.ask(search.topics_with, topics, message_id)
        if found(topic, message_id, await look(topic)) is not None
    ]
