"""The checker's verdicts, on handwritten ledgers: what it finds, and what it accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pytest

from tests.torture.causes import Window
from tests.torture.checker import check
from tests.torture.reading import ARCHIVED, load
from tests.torture.report import lateness, redelivery
from tests.torture.world import (
    ACK_S,
    FOREIGN,
    TOPICS,
    Do,
    Verdict,
    number_of,
    place_number,
    topic_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.torture.checker import Verdicts
    from tests.torture.reading import Run

BEGAN_US = 1_700_000_000_000_000
"""It is 20 s into an odd minute: messages with even numbers are open from 40 s to 100 s."""

SENDER, HANDLER, OTHER = 1, 2, 3


def us(seconds: float) -> int:
    """An instant of the story, in microseconds."""
    return BEGAN_US + round(seconds * 1e6)


class Papers:
    """The files that a run would leave. Instants are in seconds from its beginning.

    `number` and `topic` are those of the last message: later methods concern that one.
    """

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.handled: dict[int, list[str]] = {HANDLER: []}
        self.stalls: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.archived: list[int] = []
        self.logs: dict[str, str] = {}
        self.samples: list[dict[str, Any]] = []
        self.final: dict[str, Any] = {"live": [], "findings": [], "ticks": None, "bodies": 0}
        self.stats: dict[str, int] = {}
        self.number, self.old, self.topic = 0, 0, "fickle"
        self._count = self._calls = 0
        self._dues: dict[int, float] = {}
        for number, role in (
            (SENDER, "producer-1"),
            (HANDLER, "consumer-1"),
            (OTHER, "consumer-2"),
        ):
            self.event("start", 0, role=role, number=number)

    def event(self, event: str, at_s: float, **fields: Any) -> Self:
        self.events.append({"event": event, "at": us(at_s), **fields})
        return self

    def fault(self, kind: str, target: str, since_s: float, until_s: float, **more: Any) -> Self:
        span = {"since": us(since_s), "until": us(until_s)}
        return self.event("fault", until_s, kind=kind, target=target, **span, **more)

    def kill(self, process: int, at_s: float, role: str = "consumer-1") -> Self:
        return self.fault("kill-consumer", role, at_s, at_s + 1, numbers=[process], killed=us(at_s))

    def freeze(self, process: int, since_s: float, until_s: float) -> Self:
        return self.fault("freeze-consumer", "consumer-1", since_s, until_s, numbers=[process])

    def stall(self, since_s: float, until_s: float) -> Self:
        self.stalls.append(f"{us(since_s)}\t{us(until_s)}")
        return self

    def loss(self, since_s: float, until_s: float) -> Self:
        return self.event("loss", until_s, since=us(since_s), until=us(until_s))

    def end(self, role: str, how: str, code: int, age_s: float = 60.0) -> Self:
        return self.event("end", 1, role=role, number=9, how=how, code=code, age_s=age_s)

    # What a sender writes

    def send(
        self,
        topic: str = "fickle",
        *,
        at_s: float = 0.0,
        due: str = "+1000",
        do: Do = Do.OK,
        ttl_ms: int = 0,
        answer: str | None = "a",
    ) -> Self:
        self._begin(topic, due, at_s)
        self._call("S", at_s, topic_number(topic), self.number, 1, int(do), due, ttl_ms)
        return self._answer(at_s, answer)

    def _begin(self, topic: str, due: str, at_s: float) -> None:
        self.number, self.topic = number_of(SENDER, self._count), topic
        self._count += 1
        self._due(due, at_s)

    def _due(self, due: str, at_s: float) -> None:
        at_us = us(at_s) + int(due) * 1000 if due.startswith("+") else int(due) * 1000
        self._dues[self.number] = (at_us - BEGAN_US) / 1e6

    def cancel(self, at_s: float, answer: str | None = "c") -> Self:
        self._call("X", at_s, self.number)
        return self._answer(at_s, answer)

    def move(self, at_s: float, due: str, answer: str | None = "r") -> Self:
        if answer == "r":
            self._due(due, at_s)
        self._call("R", at_s, self.number, due)
        return self._answer(at_s, answer)

    def again(self, at_s: float, due: str, answer: str | None = "d") -> Self:
        self._call("D", at_s, self.number, due)
        return self._answer(at_s, answer)

    def replace(self, at_s: float, due: str, answer: str | None = "r") -> Self:
        self.old = self.number
        self._begin("fickle", due, at_s)
        self._call("P", at_s, topic_number("fickle"), self.number, self.old, due)
        return self._answer(at_s, answer)

    def _call(self, kind: str, at_s: float, *fields: object) -> None:
        self._calls += 1
        self.sent.append("\t".join(map(str, (kind, self._calls, us(at_s), *fields))))

    def _answer(self, at_s: float, letters: str | None) -> Self:
        """None: an error, four seconds later, that a fault explains."""
        if letters is None:
            self.sent.append(f"E\t{self._calls}\t{us(at_s + 4)}\t0\tServerUnavailable")
            self.fault("hang", "producer", at_s, at_s + 3)
        else:
            self.sent.append(f"C\t{self._calls}\t{us(at_s + 0.01)}\t{letters}")
        return self

    def fail(self, error: str = "ServerUnavailable", role: str = "producer-1") -> Self:
        """A send at 20 s ends in an error at 24 s, without any fault."""
        self.events[0]["role"] = role
        self.send(at_s=20.0, answer=None)
        self.events.pop()
        self.sent[-1] = self.sent[-1].replace("ServerUnavailable", error)
        return self

    # What a handler writes

    def handle(
        self,
        at_s: float,
        verdict: Verdict = Verdict.OK,
        *,
        number: int | None = None,
        took_s: float | None = 0.001,
        topic: str = "",
        group: str = "lisa",
        attempt: int = 1,
        due_s: float | None = None,
        asked: bool = True,
        unsure_s: float = 0.0,
        process: int = HANDLER,
    ) -> Self:
        """It began up to `unsure_s` after `at_s`, and ended up to that before its end."""
        number = self.number if number is None else number
        if due_s is None:  # the due time asked for, unless the test sets a wrong one
            due_s = min(at_s, self._dues.get(number, at_s)) if attempt == 1 else at_s
        end, end_from = (
            (0, 0) if took_s is None else (us(at_s + took_s), us(at_s + took_s - unsure_s))
        )
        line = (
            number,
            place_number(topic or self.topic, group),
            attempt,
            us(due_s) // 1000,
            us(at_s),
            end,
            int(Verdict.BEGUN if took_s is None else verdict),
            int(asked),
            us(at_s + unsure_s),
            end_from,
        )
        self.handled.setdefault(process, []).append("\t".join(map(str, line)))
        return self

    def stay(self, state: str, group: str | None = "lisa") -> Self:
        """The message is still there at the end."""
        live = {"number": self.number, "topic": self.topic, "group": group, "state": state}
        self.final["live"].append({**live, "id": "x", "attempts": 1, "reason": "ack timeout"})
        self.final["bodies"] += 1
        return self

    def archive(self) -> Self:
        """The message must be restored if the server loses it."""
        self.archived.append(self.number)
        return self

    def count(self, **stats: int) -> Self:
        """The server's counters at the end."""
        self.stats.update(stats)
        return self

    def run(self, out: Path) -> Run:
        """Write all files, and read them as the checker does."""
        (out / "ledgers").mkdir()
        (out / "logs").mkdir()
        final = {"stats": {topic.name: self.stats for topic in TOPICS}, **self.final}
        files = {
            f"ledgers/sent-{SENDER}.tsv": self.sent,
            f"ledgers/handled-{HANDLER}.stalls": self.stalls,
            "stage.jsonl": map(json.dumps, self.events),
            "samples.jsonl": map(json.dumps, self.samples),
            "final.json": [json.dumps(final)],
            ARCHIVED: [json.dumps(self.archived)],
            **{f"ledgers/handled-{process}.tsv": rows for process, rows in self.handled.items()},
        }
        for name, lines in files.items():
            (out / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for name, text in self.logs.items():
            (out / "logs" / name).write_text(text, encoding="utf-8")
        return load(out)


T = TypeVar("T")
Story = Callable[[Papers], object]


def outcome(verdicts: Verdicts) -> str:
    """The findings by kind."""
    guilty = [kind for kind, found in verdicts.guilty.items() for _ in found]
    excused = [f"{kind} excused" for kind, found in verdicts.excused.items() for _ in found]
    return ", ".join(guilty + excused) or "clean"


# Stories that several cases tell


def in_time(p: Papers) -> Papers:
    """A message with a ttl is not handled, but ten others that were due with it are."""
    p.send(ttl_ms=500).count(expired=1)
    for _ in range(10):
        p.send().handle(1.02, due_s=1.0)
    return p


def twice(p: Papers, first_s: float = 1.1, second_s: float = 5.0) -> Papers:
    """A message is handled successfully by two processes."""
    return p.send().handle(first_s).handle(second_s, attempt=2, process=OTHER)


def failed(p: Papers, second_s: float, attempt: int = 2, **more: Any) -> Papers:
    """A handler fails, and another attempt follows."""
    p.send("hard", do=Do.RAISE).handle(1.1, Verdict.FAILED)
    return p.handle(second_s, attempt=attempt, **{"due_s": 1.0, **more})


def killed(p: Papers) -> Papers:
    """A slow handler is killed at 4 s, and the message is delivered again at 30 s."""
    p.send("hard", do=Do.SLOWER).handle(1.1, took_s=None).kill(HANDLER, 4.0)
    return p.handle(30.0, process=OTHER)


def poisoned(p: Papers, *attempts: int, do: Do = Do.POISON) -> Papers:
    """Handlers fail, and the message ends in garbage."""
    p.send("hard", do=do)
    for attempt in attempts:
        p.handle(0.1 + attempt, Verdict.FAILED, attempt=attempt)
    return p.stay("garbage")


def repaired(p: Papers, kind: str, found: str, at_s: float = 5.0) -> Papers:
    """The run damages a topic, and has fsck repair it."""
    return p.fault(kind, "fickle/lisa", at_s, at_s + 1, repaired={"fickle": {found: 3}})


def repaired_at_the_end(p: Papers) -> Papers:
    return repaired(p, "trim", "entry-lost").event(
        "repair", 40, repaired={"fickle": {"entry-lost": 1}}
    )


def grows(p: Papers, name: str, first: float, last: float, seconds: int = 1200) -> Papers:
    p.event("load", 0).event("sent", seconds)
    p.samples += [
        {"at": us(at), "found": {name: first + (last - first) * at / seconds}}
        for at in range(0, seconds + 1, 5)
    ]
    return p


def ticks(p: Papers, expected: list[int], found: list[int], **more: Any) -> Papers:
    schedule = {"version": 1, "behind_ms": 0, "expected": expected, "found": found}
    final = {"sent": len(found), "findings": [], **more}
    p.final["ticks"] = {"schedules": {"s": {**schedule, **more}}, **final}
    return p


def rolled_ticks(p: Papers) -> Papers:
    return ticks(
        p.fault("roll", "server", 0.5, 2.0), [us(1.0) // 1000, us(3.0) // 1000], [us(3.0) // 1000]
    )


def windowed(p: Papers, at_s: float, due_s: float | None = None, **more: Any) -> Papers:
    """An even message is handled; it was sent with a delay of a second, at the start by default."""
    p.send("windows", at_s=0 if due_s is not None else at_s - 1)
    return p.handle(at_s, due_s=at_s if due_s is None else due_s, **more)


def each(name: str, values: Iterable[T], story: Callable[[T, Papers], object]) -> dict[str, Story]:
    """One case for each value."""
    return {name.format(value): partial(story, value) for value in values}


TRACE = """2026-11-22T01:11:19.798Z WARNING lisa.consumer: topic hard: was not handled
Traceback (most recent call last):
  File "handlers.py", line 131, in handling
    raise Trouble(f"attempt {one.attempt}")
"""

CASES: dict[str, dict[str, Story]] = {
    "lost": {
        "never handled": lambda p: p.send(),
        "not in one of two groups": lambda p: p.send("two").handle(1.1, group="west"),
        "its handler failed": lambda p: p.send("hard").handle(1.1, Verdict.FAILED),
        "its handler did not end": lambda p: p.send("hard").handle(1.1, took_s=None),
        "a replacement": lambda p: p.send().replace(0.5, "+1000"),
        "a cancel that came too late": lambda p: p.send().cancel(0.5, "i"),
        "a ttl, where nothing expired": lambda p: p.send(ttl_ms=500),
        "a ttl, where others were in time": in_time,
        "discarded, yet not in garbage": lambda p: p.send("hard", do=Do.DISCARD).handle(
            1.1, Verdict.DISCARDED
        ),
        "confirmed before what the server lost": lambda p: p.send(at_s=1.0).loss(2.0, 3.0),
        "archived, yet not restored": lambda p: p.send("bulk").archive().loss(0.0, 1.0),
        "a tick": lambda p: ticks(p, [1, 2, 3], [1, 3]),
    },
    "lost excused": {
        "its body was deleted": lambda p: p.send().fault(
            "delete-bodies", "fickle", 0.5, 0.6, messages=[p.number], deleted=True
        ),
        "its body was deleted, and it had a ttl": lambda p: p.send(ttl_ms=500).fault(
            "delete-bodies", "fickle", 0.5, 0.6, messages=[p.number], deleted=True
        ),
        "the server lost it": lambda p: p.send(at_s=2.5).loss(2.0, 3.0),
        "the server lost a tick": lambda p: ticks(p.loss(10, 11), [1, 2, 3], [1, 3]),
    },
    "early": {
        "by its own due time": lambda p: p.send().handle(1.0, due_s=1.001),
        "a retry": lambda p: failed(p, 1.35, due_s=1.4),
        "by a delay": lambda p: p.send().handle(1.0, due_s=0.95),
        "by an absolute due time": lambda p: p.send(due=f"{us(2.0) // 1000}").handle(1.5),
        "after it was put off": lambda p: p.send().move(0.5, "+3000").handle(1.1),
        "by a duplicate": lambda p: p.send(due="+3000").again(0.1, "+1000").handle(1.2),
        "before its window opens": lambda p: windowed(p, 39.5),
        "after its window closed": lambda p: windowed(p, 101.0),
    },
    "late": {
        "without a fault": lambda p: p.send().handle(4.1),
        "by its due time": lambda p: p.send().handle(5.0, due_s=5.0),
        "by its new due time": lambda p: p.send().move(0.5, "+9000").handle(12.6),
        "brought forward in vain": lambda p: (
            p.send(due="+9000").move(0.5, "+0").handle(9.1, due_s=9.0)
        ),
        "past its ttl": lambda p: p.send(ttl_ms=500).handle(2.6),
        "deferred to the wrong window": lambda p: windowed(p, 160.1, 160.0),
        "deferred within its window": lambda p: windowed(p, 41.1, 41.0),
    },
    "after cancel": {
        "handled": lambda p: p.send().cancel(0.5).handle(1.1),
        "another process was frozen": lambda p: (
            p.freeze(HANDLER, 1.0, 6.0).send().cancel(5.0).handle(6.001, process=OTHER)
        ),
    },
    "after cancel excused": {
        "the server lost the cancel": lambda p: p.send().cancel(0.5).loss(0.3, 0.8).handle(1.1),
        "the process was frozen": lambda p: (
            p.freeze(HANDLER, 1.0, 6.0).send().cancel(5.0).handle(6.001)
        ),
    },
    "after replace": {
        "handled": lambda p: p.send().replace(0.5, "+1000").handle(3.0, number=p.old).handle(1.6),
    },
    "lost excused, after replace excused": {
        "the server lost a replacement": lambda p: (
            p.loss(0.3, 0.8).send().replace(0.5, "+1000").handle(3.0, number=p.old)
        ),
    },
    "stuck": {
        **each(
            "{}",
            ("waiting", "ready", "in_flight", "retry"),
            lambda state, p: p.send().stay(state, None if state == "waiting" else "lisa"),
        ),
        "a schedule": lambda p: ticks(p, [1, 2], [1, 2], behind_ms=60_000),
        "a schedule without a next tick": lambda p: ticks(p, [1, 2], [1, 2], behind_ms=None),
    },
    "unexplained": {
        # handled again
        "twice": twice,
        "twice, another process killed": lambda p: twice(p).kill(4, 1.2, "consumer-4"),
        "twice, another process frozen": lambda p: twice(p).freeze(5, 1.0, 6.0),
        "twice, a fault at another door": lambda p: (
            twice(p).fault("hang", "producer", 1.0, 6.0).fault("cut", "gateway", 1.0, 6.0)
        ),
        "twice, long after faults": lambda p: (
            twice(p, 20.0, 25.0).fault("server-kill", "server", 2.0, 3.0).freeze(HANDLER, 2.0, 8.0)
        ),
        "twice, long before faults": lambda p: (
            twice(p, 1.1, 40.0).fault("server-kill", "server", 19.0, 20.0).kill(HANDLER, 20.0)
        ),
        "twice, another message trimmed": lambda p: twice(p).fault(
            "trim", "fickle/lisa", 1.0, 1.2, messages=[12345]
        ),
        "twice, faults that do no such thing": lambda p: (
            twice(p)
            .fault("script-flush", "server", 1.0, 1.2)
            .fault("kill-manager", "manager-1", 1.0, 1.2, numbers=[7], killed=us(1.0))
        ),
        "twice, a fault that was skipped": lambda p: twice(p).fault(
            "server-kill", "server", 2.0, 3.0, skipped="not done"
        ),
        "twice, and then a fault": lambda p: twice(p).fault("server-kill", "server", 5.5, 6.5),
        "a retry without its pause": lambda p: failed(p, 1.2),
        "a retry that repeats its attempt": lambda p: failed(p, 1.4, 1),
        "a retry that leaves out an attempt": lambda p: failed(p, 1.4, 3),
        "in another topic": lambda p: p.send().handle(1.1).handle(1.1, topic="async"),
        "sent by nobody": lambda p: p.handle(1.0, number=99),
        "a deferral that counted": lambda p: windowed(p, 40.1, 40.0, attempt=2),
        # calls
        "a call failed": lambda p: p.fail(),
        "a call failed, a fault at another door": lambda p: p.fail().fault(
            "refuse", "consumer", 19.0, 21.0
        ),
        "a call failed, another process frozen": lambda p: p.fail().freeze(7, 19.0, 25.0),
        "a call failed long after a fault": lambda p: p.fail().fault(
            "server-stop", "server", 8.0, 10.0
        ),
        "a call failed, and a fault was skipped": lambda p: p.fail().fault(
            "server-stop", "server", 19.0, 21.0, skipped="it does not run"
        ),
        **each(
            "a call failed in a fault with {}",
            ("TopicFull", "LisaError", "KeyError", "Unanswered 400", "Unanswered 500"),
            lambda error, p: (
                p.fail(error, "producer-http")
                .kill(9, 19.0, "gateway-1")
                .fault("server-kill", "server", 19.0, 24.0)
            ),
        ),
        "another role was rolled": lambda p: p.fail("Unanswered", "producer-http").fault(
            "roll", "server", 19.0, 24.0, rolled=["manager-1"]
        ),
        "cancelled after it was handled": lambda p: p.send().handle(1.1).cancel(1.2),
        "a new id that is known": lambda p: p.send(answer="d").handle(1.1),
        "accepted twice": lambda p: p.send(due="+3000").again(0.1, "+3000", "a").handle(3.2),
        "replaced, and accepted as new": lambda p: p.send().replace(0.5, "+1000", "a").handle(1.6),
        # the final state
        "garbage without a reason": lambda p: p.send().stay("garbage"),
        "poison in garbage too soon": lambda p: poisoned(p, 1, 2),
        "discarded by nobody": lambda p: poisoned(p, do=Do.DISCARD),
        "found by fsck": lambda p: p.final["findings"].append(
            {"kind": "no-place", "topic": "fickle", "id": "1-0", "what": ""}
        ),
        "a body too many": lambda p: p.final.update(bodies=1),
        "a tick of no schedule": lambda p: ticks(p, [1, 2], [1, 2, 5]),
        "a schedule that changed": lambda p: ticks(p, [1, 2], [1, 2], version=2),
        "ticks that were counted twice": lambda p: ticks(p, [1, 2], [1, 2], sent=3),
        "ticks that fsck finds": lambda p: ticks(
            p, [1, 2], [1, 2], findings=["a tick without a schedule"]
        ),
        # repairs, processes, logs and memory
        **each(
            "a finding that {} does not cause",
            FOREIGN,
            lambda kind, p: repaired(p, kind, "second-place"),
        ),
        "damage that was repaired before": lambda p: repaired(
            repaired(p, "delete-bodies", "no-body"), "trim", "no-body", 10.0
        ),
        "damage that comes again": repaired_at_the_end,
        "a process that ended": lambda p: p.end("manager-1", "by itself", 0),
        "a process that ignored SIGTERM": lambda p: p.end("consumer-1", "told to", -15),
        "a process that was killed": lambda p: p.kill(8, 5.0, "producer-1").end(
            "producer-1", "told to", -9
        ),
        "an error that was only logged": lambda p: p.logs.update(
            {"a.log": f"{TRACE}tests.torture.handlers.Trouble: no\n\n{TRACE}ValueError: no\n"}
        ),
        "a group of errors that was only logged": lambda p: p.logs.update(
            {"a.log": "  + Exception Group Traceback (most recent call last):\n  |   File 'a.py'\n"}
        ),
        "the server's memory grows": lambda p: grows(p, "server used MB", 50, 200),
        "a role's memory grows": lambda p: grows(p, "consumer-1 rss MB", 50, 200),
        "the keys grow": lambda p: grows(p, "keys", 50_000, 200_000),
    },
    "clean": {
        # not lost
        "handled": lambda p: p.send().handle(1.002),
        "by both groups": lambda p: (
            p.send("two").handle(1.1, group="east").handle(1.1, group="west")
        ),
        "not confirmed": lambda p: p.send(answer=None),
        "cancelled": lambda p: p.send().cancel(0.5),
        "perhaps cancelled": lambda p: p.send().cancel(0.5, None),
        "replaced": lambda p: p.send().replace(0.5, "+1000").handle(1.6),
        "discarded": lambda p: (
            p.send("hard", do=Do.DISCARD).handle(1.1, Verdict.DISCARDED).stay("garbage")
        ),
        "expired": lambda p: p.send(ttl_ms=500).count(expired=1),
        "skipped": lambda p: p.send(ttl_ms=2_000).count(skipped=1),
        "expired in a fault": lambda p: in_time(p).fault("cut", "consumer", 0.5, 0.6),
        # not early
        **each(
            "brought forward, answer {}",
            ("r", "i", None),
            lambda answer, p: p.send(due="+5000").move(0.5, "+0", answer).handle(0.6),
        ),
        **each(
            "perhaps put off, answer {}",
            ("i", None),
            lambda answer, p: p.send().move(0.5, "+3000", answer).handle(1.1),
        ),
        "put off, but the server lost it": lambda p: (
            p.send().move(0.5, "+3000").loss(0.3, 0.8).handle(1.1)
        ),
        "sent again, as the first was not confirmed": lambda p: (
            p.send(due="+3000", answer=None).again(0.1, "+1000").handle(1.2)
        ),
        # not late
        "a little late": lambda p: p.send().handle(3.9),
        **each(
            "late because of {}",
            ("server-stop", "refuse"),
            lambda kind, p: p.send(due="+20000").handle(29.0).fault(kind, "consumer", 19.0, 21.0),
        ),
        "late because of a stall": lambda p: p.send(due="+20000").handle(29.0).stall(21, 23),
        "late in another attempt": lambda p: failed(p, 8.0, due_s=1.4),
        "put off, and in time": lambda p: p.send().move(0.5, "+9000").handle(9.6),
        **each(
            "perhaps brought forward, answer {}",
            ("i", None),
            lambda answer, p: p.send(due="+9000").move(0.5, "+0", answer).handle(9.1),
        ),
        "due at its repair": lambda p: (
            p.send()
            .fault("trim", "fickle/lisa", 1.0, 3.0, messages=[p.number])
            .handle(3.1, due_s=3.0)
        ),
        **each(
            "restored, answer {}",
            ("a", None),
            lambda answer, p: (
                p.send("bulk", at_s=5.0, due="+20000", answer=answer).loss(4.0, 8.0).handle(40.0)
            ),
        ),
        "shortly past its ttl": lambda p: p.send(ttl_ms=500).handle(2.4),
        "past its ttl because of a fault": lambda p: (
            p.send(ttl_ms=500).handle(2.6).freeze(HANDLER, 1.1, 2.5)
        ),
        # windows
        "as its window opens": lambda p: windowed(p, 39.999),
        "in its window": lambda p: windowed(p, 40.1, 40.0),
        "shortly after its window closed": lambda p: windowed(p, 100.3),
        "stood still as its window closed": lambda p: (
            p.send("windows", at_s=98.0).handle(102.0, due_s=99.0).stall(99.8, 101.9)
        ),
        "a fault counted an attempt": lambda p: windowed(p, 40.1, 40.0, attempt=2).freeze(
            HANDLER, 30.0, 36.0
        ),
        # second calls
        "handled before its cancel was confirmed": lambda p: p.send().cancel(1.095).handle(1.1),
        "cancelled at an unknown time": lambda p: p.send().cancel(1.0).handle(1.2, asked=False),
        "a cancel that says that it is late": lambda p: p.send().handle(1.1).cancel(1.2, "d"),
        "cancelled after its lease was lost": lambda p: (
            p.send().handle(1.1, took_s=6.0).freeze(HANDLER, 1.2, 6.5).cancel(7.2)
        ),
        "begun before it was replaced": lambda p: (
            p.send().replace(1.05, "+1000").handle(1.2, number=p.old).handle(2.1)
        ),
        "perhaps replaced": lambda p: p.send().replace(0.5, "+1000", None),
        "perhaps replaced, and handled": lambda p: (
            p.send().replace(0.5, "+1000", None).handle(5.0, number=p.old, due_s=1.0)
        ),
        "accepted again after a loss": lambda p: (
            p.send(due="+3000").loss(0.0, 0.5).again(0.6, "+1000", "a").handle(1.7, due_s=1.6)
        ),
        "accepted again after its body was deleted": lambda p: (
            p.send(due="+3000")
            .fault("delete-bodies", "fickle", 0.2, 0.5, messages=[p.number], deleted=True)
            .again(0.6, "+1000", "a")
            .handle(1.7, due_s=1.6)
        ),
        # failed calls
        **each(
            "a call failed with {}",
            ("ServerUnavailable", "NotReplicated", "Misplaced"),
            lambda error, p: p.fail(error).fault("server-stop", "server", 19.0, 21.0),
        ),
        **each(
            "a call failed at the door {}",
            ("producer", "*"),
            lambda door, p: p.fail().fault("hang", door, 18.0, 19.5),
        ),
        "a call failed, its process frozen": lambda p: p.fail().freeze(SENDER, 19.0, 25.0),
        "a call failed in a stall": lambda p: p.fail().stall(21.0, 23.0),
        **each(
            "the gateway was killed: {}",
            ("Unanswered", "Unanswered 503"),
            lambda error, p: p.fail(error, "producer-http").kill(9, 19.0, "gateway-1"),
        ),
        "the gateway was rolled": lambda p: p.fail("Unanswered", "producer-http").fault(
            "roll", "server", 19.0, 24.0, rolled=["manager-1", "gateway-1"]
        ),
        # handled again with a cause
        "twice, its process killed": lambda p: twice(p).kill(HANDLER, 1.2),
        "killed while it was handled": killed,
        "twice, its process frozen": lambda p: twice(p).freeze(HANDLER, 1.0, 6.0),
        "twice, cut off": lambda p: twice(p).fault("cut", "consumer", 1.0, 1.2),
        "twice, the server killed": lambda p: twice(p).fault("server-kill", "server", 2, 3),
        "twice, trimmed": lambda p: twice(p).fault(
            "trim", "fickle/lisa", 1, 1.2, messages=[p.number]
        ),
        "twice, the ack lost by the server": lambda p: twice(p, 1.1, 30.0).loss(1.0, 3.0),
        "twice, its process stood still": lambda p: twice(p).stall(1.0, 4.0),
        "twice, the other process frozen": lambda p: twice(p).freeze(OTHER, 0.9, 4.9),
        "its group was destroyed": lambda p: (
            p.send("hard", do=Do.SLOW)
            .handle(1.1, took_s=0.5)
            .handle(1.3)
            .fault("destroy-group", "hard/lisa", 1.2, 1.2, places=[16], redelivers=True)
        ),
        "its handler hung": lambda p: (
            p.send("hang", do=Do.HANG).handle(1.1, took_s=6.0).handle(5.0, attempt=2)
        ),
        "its handler hung until it was killed": lambda p: (
            p.send("hang", do=Do.HANG)
            .handle(1.1, took_s=None)
            .handle(5.6, attempt=2)
            .kill(HANDLER, 6.5)
        ),
        "a retry": lambda p: failed(p, 1.4),
        "a retry after an unknown time": lambda p: (
            p.send("hard", do=Do.RAISE)
            .handle(1.1, Verdict.FAILED, unsure_s=0.06)
            .handle(1.2, attempt=2, unsure_s=0.06)
        ),
        "a retry that was moved": lambda p: (
            p.send("hard", do=Do.RAISE)
            .handle(1.1, Verdict.FAILED)
            .move(1.15, "+0")
            .handle(1.17, attempt=2)
        ),
        "a retry after a fault": lambda p: failed(p, 1.15, 1).fault(
            "destroy-group", "hard/lisa", 1.101, 1.102, places=[16], redelivers=True
        ),
        # the final state
        "poison in garbage": lambda p: poisoned(p, 1, 2, 3),
        "poison whose attempts a fault used up": lambda p: poisoned(p, 2).kill(HANDLER, 2.05),
        "ticks": lambda p: ticks(p, [1, 2, 3], [1, 2, 3]),
        "ticks of an earlier build": rolled_ticks,
        # repairs, processes, logs and memory
        **each(
            "{} after its damage",
            [(kind, found) for kind, allowed in FOREIGN.items() for found in sorted(allowed)],
            lambda damage, p: repaired(p, *damage),
        ),
        "damage that is not repaired yet": lambda p: repaired(p, "trim", "no-body", 10.0).fault(
            "delete-bodies", "fickle", 5.0, 5.5
        ),
        "damage that comes again with the server's data": lambda p: repaired_at_the_end(p).loss(
            4.0, 7.0
        ),
        "processes that end": lambda p: (
            p.end("manager-1", "told to", 0)
            .end("consumer-1", "killed", -9)
            .end("producer-1", "told to", -15, age_s=0.5)
            .kill(9, 5.0, "producer-1")
            .end("producer-1", "told to", -9)
        ),
        "errors in logs": lambda p: p.logs.update(
            {"a.log": f"{TRACE}{TRACE}ValueErr", "archive-1.log": f"{TRACE}ValueError: no\n"}
        ),
        "what may grow": lambda p: grows(grows(p, "garbage", 10, 1_000), "server used MB", 20, 30),
        "a short run": lambda p: grows(p, "keys", 0, 200_000, seconds=500),
    },
}


@pytest.mark.parametrize(
    ("expected", "name"), [(outcome, name) for outcome, cases in CASES.items() for name in cases]
)
def test_verdicts(tmp_path: Path, expected: str, name: str) -> None:
    papers = Papers()
    CASES[expected][name](papers)
    verdicts = check(papers.run(tmp_path))
    assert outcome(verdicts) == expected, verdicts


def test_messages_and_handlings_are_named_and_counted(tmp_path: Path) -> None:
    p = Papers()
    p.freeze(HANDLER, 2.0, 4.0)
    p.count(**{"deferred@lisa": 3})
    p.send().handle(1.1).send().handle(1.1, process=OTHER)
    p.send(due="+30000").handle(30.1)
    windowed(p, 40.1, 40.0)
    p.send("hard", do=Do.SLOW).handle(50.0, took_s=None).handle(50.0, took_s=0.3)
    lost = p.send("two").handle(1.1, group="west").number
    verdicts = check(p.run(tmp_path))
    [finding] = verdicts.guilty["lost"]
    assert (finding.number, finding.what) == (lost, "two/east, OK")
    counts = verdicts.counts
    assert counts["confirmed"] == counts["handlings"] == 6
    assert counts["handlings held to account"] == 4  # all but two around the freeze
    assert (counts["handlings with a window"], counts["deferred"]) == (1, 3)


def test_many_messages_in_a_call_and_torn_lines(tmp_path: Path) -> None:
    p, first = Papers(), number_of(SENDER, 0)
    p.sent += [
        f"S\t1\t{us(0)}\t0\t{first}\t3\t0\t+1000,+2000,+3000\t0",
        f"C\t1\t{us(0.1)}\ta",
        f"S\t2\t{us(0)}\t0\t{first + 3}\t3\t0\t+1000\t0",
        f"E\t2\t{us(4)}\t2\tServerUnavailable",  # two of the three are confirmed
    ]
    for place, at_s in enumerate((1.1, 2.1, 2.9)):
        p.handle(at_s, number=first + place, topic="bulk")
    p.fault("refuse", "producer", 0.5, 2.5)
    p.run(tmp_path)
    for name, torn in (("sent-1", "S\t7\t17000"), ("handled-2", "4294967296\t24")):
        with (tmp_path / "ledgers" / f"{name}.tsv").open("a") as ledger:
            ledger.write(torn)  # by a kill
    verdicts = check(load(tmp_path))
    assert outcome(verdicts) == "lost, lost, early"
    assert [finding.number for finding in verdicts.guilty["early"]] == [first + 2]
    assert (verdicts.counts["confirmed"], verdicts.counts["handlings"]) == (5, 3)


def test_lateness_and_redelivery(tmp_path: Path) -> None:
    p = Papers()
    for number, late_ms in enumerate((1, 2, 3)):
        p.send().handle(1.5 + number / 10 + late_ms / 1e3, due_s=1.5 + number / 10)
    p.send().handle(12.5, due_s=9.9)
    killed(p)
    run = p.run(tmp_path)
    late = lateness(run, [Window(us(4.0), us(14.0), "kill-consumer")])
    assert late["outside faults"]["max"] == 100
    assert late["inside faults"]["max"] == 29_000
    found = redelivery(run, [Window(us(4.0), us(5.0), "kill-consumer")])
    assert found["alone"]["max"] == round((30.0 - 4.0) / ACK_S, 3)
