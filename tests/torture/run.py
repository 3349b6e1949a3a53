"""One run from beginning to end: load, faults, drain, and the final state."""

from __future__ import annotations

import heapq
import json
import resource
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from lisa.admin.fsck import check
from lisa.admin.messages import LiveState, list_messages
from lisa.core.model.errors import LisaError
from lisa.core.model.recurring.definition import define
from lisa.core.model.recurring.ticks import next_tick
from lisa.core.store import schedules
from lisa.core.transitions.groups import Declare
from tests.torture.faults import begin, draw, numbers_in, repair
from tests.torture.ledger import Ledger
from tests.torture.reading import ARCHIVED
from tests.torture.stage import Stage, now_us
from tests.torture.world import ACK_S, FOREIGN, MINUTE_MS, SCHEDULES, TICKS, TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lisa.core.store.store import SyncStore
    from tests.torture.__main__ import Options
    from tests.torture.faults import Fault

STEP_S = 0.05
TELL_EVERY_S, SAMPLE_EVERY_S = 10.0, 5.0
STARTS_WITHIN_S = 120.0  # all roles, on a busy machine
JVM_STARTS_WITHIN_S = 600.0
STUCK_AFTER_S = 10 * ACK_S
"""Messages are stuck after the longest delay, a closed window, and this long without 10 % progress
or a fault."""

LESS = 0.9
PAGE = 500
MB = 1 << 20


def run(options: Options, tell: Callable[[str], None]) -> None:
    """Run, and write the ledgers, `stage.jsonl`, `samples.jsonl` and `final.json` to `out`."""
    with closing(Stage(options)) as stage:
        stage.open()
        stage.note("begin", options=json.loads(json.dumps(options._asdict(), default=str)))
        _Run(stage, tell).whole()


class _Run:
    """The steps of a run. `_steps` are those of faults, each at its time."""

    def __init__(self, stage: Stage, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._tell = tell
        self._samples = Ledger(stage.out / "samples.jsonl")
        self._next_sample = self._next_word = 0.0
        self._began = time.monotonic()
        self._doing = ""
        self._steps: list[tuple[float, int, Iterator[float]]] = []

    def whole(self) -> None:
        stage, options = self._stage, self._stage.options
        archive = stage.out / "archive"
        stage.start_roles("manager", "consumer", "gateway", "puller", "archive")
        # A group declared later does not owe messages promoted earlier, and calls before the
        # gateway listens fail without a fault.
        self._await(self._has_groups, STARTS_WITHIN_S, "the groups were not declared")
        stage.tail.begin()
        self._await(lambda: stage.is_gateway_open, STARTS_WITHIN_S, "the gateway did not begin")
        first_ticks = {} if options.restore else begin_schedules(stage.store)
        stage.start_roles("producer")
        if options.restore:
            self._await(lambda: has_begun(archive), JVM_STARTS_WITHIN_S, "no archive")
        self._began = time.monotonic()
        stage.note("load")
        for number, fault in enumerate(draw(options)):
            heapq.heappush(self._steps, (self._began + fault.at_s, number, self._fault(fault)))
        while self._steps or time.monotonic() < self._began + options.seconds:
            self._step()
        stage.end_roles("producer")
        stage.note("sent")
        if options.restore:
            self._tell("restoring")
            stage.end_roles("archive")
            restore(stage)
        if options.persistence != "always" and FOREIGN.keys() & set(options.kinds):
            # A server that loses data may lose a repair but keep the damage.
            heapq.heappush(self._steps, (time.monotonic(), 0, self._repair()))
            while self._steps:
                self._step()
        self._drain()
        for kind in ("puller", "gateway", "consumer", "manager"):
            stage.end_roles(kind)
        final = final_state(stage, first_ticks)
        (stage.out / "final.json").write_text(json.dumps(final), encoding="utf-8")
        stage.note("over", lost_replies=stage.proxy.lost)

    def _fault(self, fault: Fault) -> Iterator[float]:
        self._doing = f"{fault.kind} {fault.target}"
        yield from begin(self._stage, fault)

    def _has_groups(self) -> bool:
        store = self._stage.store
        return all(
            set(store.drive(store.groups(topic.name))) == set(topic.groups) for topic in TOPICS
        )

    def _await(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        ends = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < ends, what
            self._step()

    def _step(self) -> None:
        """Do what is due: steps of faults, samples, a word."""
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, number, work = heapq.heappop(self._steps)
            for pause in work:
                heapq.heappush(self._steps, (time.monotonic() + pause, number, work))
                break
        stage, now = self._stage, time.monotonic()
        stage.restart_those_that_died()
        if stage.is_up:
            with suppress(redis.RedisError, LisaError):
                stage.tail.step()
                if now >= self._next_sample:
                    self._next_sample = now + SAMPLE_EVERY_S
                    line = {"at": now_us(), "found": sample(stage)}
                    self._samples.write([json.dumps(line)])
                if now >= self._next_word:
                    self._next_word = now + TELL_EVERY_S
                    self._tell(self._word())
        time.sleep(STEP_S)

    def _word(self) -> str:
        store, counts = self._stage.store, Counter[str]()
        for topic in TOPICS:
            for name, n in store.drive(store.stats(topic.name)).items():
                counts[name.partition("@")[0]] += n
        found = {"sent": counts["sent"], "acked": counts["acked"], **self._stage.standing()}
        words = [f"{n:,} {name}" for name, n in found.items()]
        return f"{time.monotonic() - self._began:6.0f} s  {'  '.join(words)}  ({self._doing})"

    def _repair(self) -> Iterator[float]:
        found = yield from repair(self._stage, [topic.name for topic in TOPICS])
        self._stage.note("repair", **(found or {}))

    def _drain(self) -> None:
        """Until only garbage is left, or nothing has moved for longer than anything may take."""
        best, since = None, time.monotonic()
        self._doing = "draining"
        patience_s = self._stage.options.longest_s + MINUTE_MS / 1000 + STUCK_AFTER_S
        while time.monotonic() < since + patience_s:
            self._step()
            standing = self._stage.standing()
            left = sum(standing[state] for state in ("waiting", "parked", "ready", "retry"))
            if not left:
                return
            if best is None or left <= LESS * best:
                best, since = left, time.monotonic()


def sample(stage: Stage) -> dict[str, float]:
    """The memory of server and roles, and lengths. Raises redis.RedisError."""
    memory = stage.client.info("memory")
    found: dict[str, float] = {
        "server used MB": int(memory["used_memory"]) / MB,
        "server rss MB": int(memory["used_memory_rss"]) / MB,
        **stage.standing(),
        "keys": int(stage.client.dbsize()),
    }
    for name, role in stage.roles.items():
        if role.now is not None and role.is_alive():
            with suppress(OSError):
                pages = Path(f"/proc/{role.now.pid}/statm").read_text(encoding="utf-8").split()[1]
                found[f"{name} rss MB"] = int(pages) * resource.getpagesize() / MB
    return found


# Schedules: defined before the faults, counted tick by tick after them


def begin_schedules(store: SyncStore) -> dict[str, int]:
    """Define the schedules; returns the first tick of each."""
    store.call(Declare(TICKS, "lisa"))
    first = {}
    for name, options in SCHEDULES.items():
        store.drive(schedules.put(store, TICKS, name, define(name, dict(options))))  # type: ignore[arg-type]
        record = store.drive(schedules.get_record(store, TICKS, name))
        assert record is not None
        assert record.tick is not None
        first[name] = record.tick
    return first


def _ticks(store: SyncStore, first: Mapping[str, int]) -> dict[str, Any] | None:
    """The ticks of each schedule that there should be, and those that there are."""
    if not first:
        return None
    keys = store.keys.topic(TICKS)
    bodies = store.connection.execute(("KEYS", keys.body("*")))
    parts = [body.decode().removeprefix(keys.body("")).partition("@") for body in bodies]
    now_ms = store.drive(store.server_time_ms())
    named: dict[str, Any] = {}
    for name, tick in first.items():
        record = store.drive(schedules.get_record(store, TICKS, name))
        ends = record.tick if record else None
        definition, expected = define(name, dict(SCHEDULES[name])), [tick]  # type: ignore[arg-type]
        while ends is not None and expected[-1] < ends:
            expected.append(next_tick(definition, 0, expected[-1]) or ends)
        if not (record and record.is_made):  # the next one counts if its message exists
            expected.pop()
        named[name] = {
            "version": record.version if record else 0,
            "behind_ms": None if ends is None else now_ms - ends,
            "expected": expected,
            "found": sorted(int(tick) for schedule, _, tick in parts if schedule == name),
        }
    report = store.drive(check(store, [TICKS]))
    sent = int(store.ask("HGET", keys.stats, "sent") or 0)
    return {"schedules": named, "sent": sent, "findings": [str(found) for found in report.findings]}


# An archive of one topic's journal, and its restore after the server lost data


def has_begun(archive: Path) -> bool:
    """Whether anything is archived yet: a JVM starts slowly."""
    return any(archive.glob("message_log/**/*.parquet"))


def restore(stage: Stage) -> None:
    """Restore what the archive has and the server lacks; note the result."""
    report = ("--report", str(stage.out / "restored"), "--json")
    command = stage.pipeline("restore", "--archive", *report)
    process = stage.process(command, "restore", stage.out / "restored.json")
    process.wait(JVM_STARTS_WITHIN_S)
    stage.ended(process, "told to")
    numbers = []
    import pyarrow.dataset as ds

    if has_begun(stage.out / "archive"):
        folder = stage.out / "archive" / "message_log"
        log_table = ds.dataset(folder, format="parquet", partitioning="hive")
        rows = log_table.to_table(["envelope"], filter=ds.field("state") == "sent")
        numbers = numbers_in(rows["envelope"].to_pylist())
    (stage.out / ARCHIVED).write_text(json.dumps(numbers), encoding="utf-8")


# The final state


def final_state(stage: Stage, first_ticks: Mapping[str, int]) -> dict[str, Any]:
    store = stage.store
    report = store.drive(check(store, [topic.name for topic in TOPICS]))
    return {
        "live": [row for topic in TOPICS for row in _live(store, topic.name)],
        "bodies": report.bodies,
        "ticks": _ticks(store, first_ticks),
        "stats": {topic.name: store.drive(store.stats(topic.name)) for topic in TOPICS},
        "findings": [asdict(finding) for finding in report.findings],
    }


def _live(store: SyncStore, topic: str) -> Iterator[dict[str, Any]]:
    keys = store.keys.topic(topic)
    for state in LiveState:
        page = store.drive(list_messages(store, topic, state, limit=PAGE))
        rows = page.rows
        while page.cursor is not None:
            page = store.drive(list_messages(store, topic, state, cursor=page.cursor, limit=PAGE))
            rows += page.rows
        for row in rows:
            [number] = numbers_in([store.ask("GET", keys.body(row.id))]) or [0]
            named = {"topic": topic, "group": row.group, "id": row.id, "reason": row.reason}
            yield {"number": number, "state": str(state), **named}  # 0: a record without a message
