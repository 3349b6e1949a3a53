"""The garbage page: lists dead messages, and offers to requeue or purge them.

Actions on all garbage that matches a filter may outlive their request; every gateway sees their
records in Redis. The record of a topic's run expires unless the process that runs it renews the
record. A request to stop the run is a separate key, which no renewal overwrites; when the run ends,
its process replaces the value with the number of affected messages.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.responses import Response

from lisa.admin import garbage as garbage_flows
from lisa.admin import story
from lisa.admin.garbage import GarbageSelection
from lisa.admin.messages import Row
from lisa.core.model.clock import duration_ms, parse_duration
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import check_group
from lisa.core.redis.flow import Flow
from lisa.core.store.store import AsyncStore, Store
from lisa.gateway.page.rendering import Body, format_body
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.visits import FINAL, Done, FormAction, PageRequest, Verb
from lisa.gateway.problems import ErrorResponse

LEASE_S = 10.0
"""How long a record lasts without renewal. Until then, its topic accepts no other run."""

LEASE_MS = round(LEASE_S * 1000)
STOP_MS = 3 * LEASE_MS
"""How long a request to stop lasts: longer than the record."""

log = logging.getLogger("lisa.gateway")

PATIENCE_S = 5.0
"""How long a request waits for an action, which then continues in the background."""

RENEW_S = 0.5
"""How often a process renews the record of its run, and notices a request to stop it."""

RELEASE_S = 1.0
"""How long an action that has ended waits for Redis to delete its record."""

POLL_S = 0.05
"""How often a request looks whether the run that it stops has ended."""

FASTEST = 10_000
"""The highest pace that can be chosen, in messages per second."""

PER_PAGE = 25
PREVIEW_BYTES = 4_096
MOST_REASONS = 20
REASONS_S = 3.0

MOST_EXAMINED = 5_000
"""Messages that one request examines at most; the next page continues from there."""

MOST_COUNTED = 100_000
"""Dead messages that a question with a filter by reason counts."""

_INSTANT = re.compile(r"[0-9]{1,15}\Z", re.ASCII)

FIELDS = ("group", "reason", "older", "kind")
"""The fields of the filter form."""


class RunRecord(msgspec.Struct, kw_only=True):
    """A running action.

    run: unique name, which begins with the name of the gateway process. rate: at most this many
    messages per second; None: as fast as possible.
    """

    run: str
    verb: str
    total: int
    rate: int | None = None
    done: int = 0


def read_run(store: Store, topic: str) -> Flow[RunRecord | None]:
    """The record of a topic's running action."""
    return _decoded((yield from store.command("GET", store.keys.topic(topic).run)))


def _decoded(content: Any) -> RunRecord | None:
    if content is not None:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(content, type=RunRecord)
    return None


def claim_run(store: Store, topic: str, record: RunRecord) -> Flow[bool]:
    """Write the record of a new run; False if another one runs on the topic."""
    key, content = store.keys.topic(topic).run, msgspec.json.encode(record)
    if (yield from store.command("SET", key, content, "NX", "PX", LEASE_MS)):
        return True
    # After a lost reply, the repeated command finds the record that the first one wrote.
    found = yield from read_run(store, topic)
    return found is not None and found.run == record.run


async def run_until_stopped(
    store: AsyncStore, topic: str, record: RunRecord, renewed: float, action: Flow[int]
) -> None:
    """Run an action and renew its record, until it ends or somebody asks to stop it.

    Stops it, too, when the record may have expired, so that another run may have begun. renewed:
    when the record was written, in the time of `time.monotonic`.
    """
    keys = store.keys.topic(topic)
    stop_key = keys.run_stop(record.run)

    async def renew() -> None:
        nonlocal renewed
        while True:
            await asyncio.sleep(RENEW_S)
            began = time.monotonic()
            if began - renewed > LEASE_S:
                log.warning(
                    "%s garbage of %s stops: its record in Redis has not been renewed for %g s",
                    record.verb,
                    topic,
                    LEASE_S,
                )
                return
            write = ("SET", keys.run, msgspec.json.encode(record), "PX", LEASE_MS)
            with suppress(LisaError):  # tried again until the record may have expired
                flow = store.commands([write, ("EXISTS", stop_key)])
                _, is_asked_to_stop = await store.drive(flow)
                renewed = began
                if is_asked_to_stop:
                    return

    tasks = [asyncio.create_task(store.drive(action)), asyncio.create_task(renew())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if time.monotonic() - renewed <= LEASE_S:  # else the record may be another run's
            answer = ("SET", stop_key, record.done, "XX", "PX", STOP_MS)
            with suppress(LisaError, TimeoutError):  # the record expires
                async with asyncio.timeout(RELEASE_S):
                    await store.drive(store.commands([answer, ("DEL", keys.run)]))
    for task in tasks:
        if not task.cancelled():
            task.result()


@dataclass(frozen=True, slots=True)
class Dead:
    """One dead message and a preview of its body."""

    row: Row
    body: Body | None
    fault: str | None


def selection_of(
    topic: str, *, group: str, reason: str, older: str, kind: str, now_ms: int
) -> GarbageSelection:
    """The selection for a filter form; empty fields do not filter. Raises InvalidMessage."""
    before = now_ms - duration_ms(parse_duration(older)) if older else None
    return GarbageSelection(
        topic=topic,
        group=check_group(group) if group else None,
        died_before_ms=before,
        reason=reason or None,
        kind=kind or None,
    )


async def show(visit: PageRequest) -> Response:
    """The kinds of reasons, and a page of dead messages, newest first."""
    line = await require_topic(visit)
    topic = line.topic
    snapshot = await visit.snapshots.current()
    fields = {name: visit.query.get(name, "").strip() for name in FIELDS}
    selection = selection_of(topic, **fields, now_ms=snapshot.at_ms)
    found = await visit.gateway.ask(
        garbage_flows.newest,
        selection,
        cursor=visit.query.get("cursor"),
        limit=PER_PAGE,
        most=MOST_EXAMINED,
    )
    ids = [row.id for row in found.rows]
    previews = await visit.gateway.ask(story.previews, topic, ids, PREVIEW_BYTES)
    dead = []
    for row, preview in zip(found.rows, previews, strict=True):
        body = None
        if preview is not None and preview.envelope is not None:
            kind, data = preview.envelope.kind, preview.envelope.body
            body = format_body(kind, data, most=PREVIEW_BYTES, whole=preview.whole)
        dead.append(Dead(row, body, preview.fault if preview else "the body was deleted"))
    whole = replace(selection, kind=None)
    reasons, examined = await visit.snapshots.share(
        ("reasons", topic, *(fields[name] for name in FIELDS if name != "kind")),
        REASONS_S,
        lambda: visit.gateway.ask(garbage_flows.by_reason, whole, most=MOST_EXAMINED),
    )
    groups = [group.name for group in line.counts.groups]
    return visit.page(
        "garbage.html",
        topic=topic,
        dead=dead,
        cursor=found.cursor,
        fields=fields,
        groups=groups,
        now_ms=snapshot.at_ms,
        line=line,
        reasons=reasons[:MOST_REASONS],
        examined=examined,
        run=await visit.gateway.ask(read_run, topic),
        is_filtered=any(fields.values()),
    )


async def _selection(action: FormAction) -> GarbageSelection:
    """The garbage that matches the filter and was dead when the confirmation was shown."""
    given = {name: action.fields.get(name, "") for name in FIELDS}
    until = action.fields.get("until", "")
    if _INSTANT.match(until):
        asked_ms = int(until)
    else:
        store = action.visit.gateway.store
        asked_ms = await store.drive(store.server_time_ms()) + 1
    found = selection_of(action.topic, **given, now_ms=asked_ms)
    return found if found.died_before_ms is not None else replace(found, died_before_ms=asked_ms)


async def _how_many(action: FormAction) -> tuple[str, int]:
    count = len(action.picked)
    if action.verb.endswith("_all"):
        selection = await _selection(action)
        if selection.reason is None and selection.kind is None:
            count = await action.visit.gateway.ask(garbage_flows.matching, selection)
        else:
            by_reason = garbage_flows.by_reason
            kinds, _ = await action.visit.gateway.ask(by_reason, selection, most=MOST_COUNTED)
            count = sum(reason.messages for reason in kinds)
    return f"{count:,} {'message' if count == 1 else 'messages'}", count


_FLOWS = {"requeue": garbage_flows.requeue, "purge": garbage_flows.purge}


async def _some(action: FormAction) -> Done:
    by_group: dict[str, list[str]] = {}
    for group, message_id in action.picked:
        by_group.setdefault(group, []).append(message_id)
    done = 0
    for group, ids in by_group.items():
        done += sum(await action.visit.gateway.ask(_FLOWS[action.verb], action.topic, group, ids))
    return Done(f"{action.verb}d", done, len(action.picked))


async def _all(action: FormAction) -> Done:
    verb, pace = action.verb.removesuffix("_all"), action.fields.get("pace", "")
    if pace and not (_INSTANT.match(pace) and 0 < int(pace) <= FASTEST):
        raise ErrorResponse(400, "form", f"the pace must be a number from 1 to {FASTEST:,}")
    gateway, topic = action.visit.gateway, action.topic
    _, total = await _how_many(action)
    record = RunRecord(
        run=f"{gateway.name}-{secrets.token_hex(3)}",
        verb=verb,
        total=total,
        rate=int(pace) if pace else None,
    )

    def count(done: int) -> None:
        record.done = done

    selection, flow = await _selection(action), _FLOWS[verb]
    began = time.monotonic()
    if not await gateway.ask(claim_run, topic, record):
        raise ErrorResponse(409, "busy", f"another action on garbage of {topic} is running")
    act = garbage_flows.act(gateway.store, selection, flow, rate=record.rate, progress=count)
    work = run_until_stopped(gateway.store, topic, record, began, act)
    task = gateway.run_task(work, f"{verb} garbage of {topic}")
    await asyncio.wait([task], timeout=PATIENCE_S)
    if not task.done():
        task.add_done_callback(lambda _: action.audit(f"{verb}d", done=record.done))
        return Done(f"{verb}_continues", record.done)
    if not task.cancelled():
        task.result()
    return Done(f"{verb}d", record.done)


async def _stop(action: FormAction) -> Done:
    """Stop a topic's action, also if it runs in another process.

    Tells how many messages it had affected: as its process answers, or else by its last known
    record.
    """
    ends, store = time.monotonic() + PATIENCE_S, action.visit.gateway.store
    record = await store.drive(read_run(store, action.topic))
    if record is None:
        return Done("stopped", 0)
    keys = store.keys.topic(action.topic)
    stop_key = keys.run_stop(record.run)
    await store.drive(store.command("SET", stop_key, "", "NX", "PX", STOP_MS))
    while True:
        asked = store.commands([("GET", keys.run), ("GET", stop_key)])
        content, answer = await store.drive(asked)
        found = _decoded(content)
        if found is None or found.run != record.run:
            return Done("stopped", int(answer) if answer else record.done)
        record = found
        if time.monotonic() > ends:
            return Done("stopped", record.done)
        await asyncio.sleep(POLL_S)


VERBS = {
    "requeue": Verb("requeueGarbage", _some),
    "purge": Verb("purgeGarbage", _some, "Purge", FINAL, _how_many),
    "requeue_all": Verb(
        "requeueGarbage", _all, "Requeue", "They become due immediately.", _how_many
    ),
    "purge_all": Verb("purgeGarbage", _all, "Purge", FINAL, _how_many),
    "stop": Verb("requeueGarbage", _stop),
}
