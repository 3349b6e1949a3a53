"""The checker's verdicts, on handwritten ledgers: what it finds, and what it accepts."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.torture.causes import Window
from tests.torture.checker import Verdicts, check
from tests.torture.reading import ARCHIVED, Run, load
from tests.torture.report import lateness, redelivery
from tests.torture.world import TOPICS, Do, Verdict, number_of, place_number, topic_number

BEGAN_US = 1_700_000_000_000_000
"""It is 20 s into an odd minute: messages with even numbers are open from 40 s to 100 s."""

SENDER, HANDLER, OTHER = 1, 2, 3
TRACE = """2026-11-22T01:11:19.798Z WARNING lisa.consumer: topic hard: was not handled
Traceback (most recent call last):
  File "handlers.py", line 131, in handling
    raise Trouble(f"attempt {one.attempt}")
"""
LOGS = {
    "trouble": f"{TRACE}tests.torture.handlers.Trouble: attempt 1\n\n",
    "error": f"{TRACE}ValueError: no\n",
    "torn": f"{TRACE}ValueErr",
    "group": "  + Exception Group Traceback (most recent call last):\n  |   File 'a.py'\n",
}

STORIES = """
== lost
never handled: send
not in one of two groups: send two; handle 1.1 group=west
it was always deferred: send hard do=DEFER; handle 1.1 DEFERRED
its handler failed: send hard; handle 1.1 FAILED
a replacement: send; replace 0.5 +1000
a cancel that came too late: send; cancel 0.5 i
a ttl, where nothing expired: send ttl_ms=500
a ttl, where others were in time: send ttl_ms=500; count expired=1; in_time 10
the last one of a key: send coalesced key=4; handle 1.1; send coalesced key=4 at_s=2 answer=r
one that had begun before the next: send coalesced key=4; send coalesced key=4 at_s=1.2; handle 2.3
one whose place another id took: send coalesced key=4; send coalesced key=4 at_s=0.5 answer=r2;
    handle 1.6
discarded, yet not in garbage: send hard do=DISCARD; handle 1.1 DISCARDED
confirmed before what the server lost: send at_s=1; loss 2 3
archived, yet not restored: send bulk; archive; loss 0 1
a tick: ticks 1,2,3 1,3

== lost excused
its body was deleted: send; fault delete-bodies fickle 0.5 0.6 messages=this deleted=yes
its body was deleted, and it had a ttl: send ttl_ms=500;
    fault delete-bodies fickle 0.5 0.6 messages=this deleted=yes
the server lost it: send at_s=2.5; loss 2 3
the server lost a tick: loss 10 11; ticks 1,2,3 1,3

== early
by its own due time: send; handle 1 due_s=1.001
a retry: send hard do=RAISE; handle 1.1 FAILED; handle 1.35 attempt=2 due_s=1.4
by a delay: send; handle 1 due_s=0.95
by an absolute due time: send due=1700000002000; handle 1.5
after it was put off: send; move 0.5 +3000; handle 1.1
before the due time of what it updates: send due=+3000; update 0.5 +1000; handle 1.6 due_s=1.5
by a duplicate: send due=+3000; again 0.1 +1000; handle 1.2
debounced: send coalesced due=+1000 key=4; handle 0.9 due_s=0.9
before its window opens: send windows at_s=38.5; handle 39.5 due_s=39.5
after its window closed: send windows at_s=100; handle 101 due_s=101

== late
without a fault: send; handle 4.1
by its due time: send; handle 5 due_s=5
by its new due time: send; move 0.5 +9000; handle 12.6
brought forward in vain: send due=+9000; move 0.5 +0; handle 9.1 due_s=9
past its ttl: send ttl_ms=500; handle 2.6
deferred to the wrong window: send windows; handle 160.1 due_s=160
deferred within its window: send windows; handle 41.1 due_s=41
debounced: send coalesced key=4; handle 1.2 due_s=1.2
at most so late: send coalesced key=5; handle 1.2 due_s=1.2
in an unused lane: send ordered key=1; handle 1.1; send ordered key=1; handle 4.2
in a lane used by another key: send ordered key=1; handle 2.1; send ordered key=2; handle 4.1

== after cancel
handled: send; cancel 0.5; handle 1.1
another process was frozen: freeze 2 1 6; send; cancel 5; handle 6.001 process=3

== after cancel excused
the server lost the cancel: send; cancel 0.5; loss 0.3 0.8; handle 1.1
the process was frozen: freeze 2 1 6; send; cancel 5; handle 6.001

== after replace
handled: send; replace 1.05 +1000; handle 1.2 number=old; handle 2.2
updated, and handled: send; update 0.5 +1000; handle 1.05 number=old; handle 1.1
in flight, and handled much later: send; replace 0.5 +1000 f; handle 3 number=old; handle 1.6

== lost excused, after replace excused
the server lost a replacement: loss 0.3 0.8; send; replace 0.5 +1000; handle 3 number=old

== at once, out of order
two of a key in order: send ordered key=1; handle 1.1 took_s=0.5; send ordered key=1; handle 1.2

== at once
two coalesced ones: send coalesced key=4; handle 1.1 took_s=2;
    send coalesced key=4 at_s=1.5; handle 2.6 process=3
three of a key: limited 3 key=1
seven of all keys: limited 2 key=1; limited 2 key=2; limited 2 key=3; limited 1 key=4
one while another's lease lasts: send coalesced key=4; handle 1.1 took_s=none; kill 2 1.2;
    send coalesced key=4 at_s=1.2; handle 2.3 process=3; handle 5 number=before attempt=2 process=3

== out of order
a retry was overtaken: send ordered key=1 do=RAISE; handle 1.1 FAILED;
    send ordered key=1; handle 1.2; handle 1.4 number=before attempt=2 due_s=1.3
a killed one was overtaken: send ordered key=1; handle 1.1 took_s=none; kill 2 1.2;
    send ordered key=1; handle 3 process=3; handle 5 number=before attempt=2 process=3
due later, and handled first: send ordered key=1; send ordered key=1 due=+1100;
    handle 1.2; handle 1.3 number=before
sent later, and handled first: send ordered key=1; send ordered key=1 at_s=0.5 due=+500;
    handle 1.2; handle 1.3 number=before
an older one of a burst: send coalesced key=4; send coalesced at_s=0.5 key=4 due=+1000 answer=r;
    handle 1.6; handle 1.7 number=before due_s=1

== stuck
waiting: send; stay waiting none
ready: send; stay ready
a schedule: ticks 1,2 1,2 behind_ms=60000
a schedule without a next tick: ticks 1,2 1,2 behind_ms=none

== unexplained, unexplained
a retry that leaves out an attempt: send hard do=RAISE; handle 1.1 FAILED;
    handle 1.4 attempt=3 due_s=1

== unexplained
twice: twice
twice, another process killed: twice; kill 4 1.2 consumer-4
twice, a fault at another door: twice; fault hang producer 1 6; fault cut gateway 1 6
twice, long after faults: twice 20 25; fault server-kill server 2 3; freeze 2 2 8
twice, another message trimmed: twice; fault trim fickle/lisa 1 1.2 messages=12345
twice, faults that do no such thing: twice; fault script-flush server 1 1.2;
    fault kill-manager manager-1 1 1.2 numbers=7
twice, a fault that was skipped: twice; fault server-kill server 2 3 skipped=yes
twice, and then a fault: twice; fault server-kill server 5.5 6.5
a retry without its pause: send hard do=RAISE; handle 1.1 FAILED; handle 1.2 attempt=2 due_s=1
a retry that repeats its attempt: send hard do=RAISE; handle 1.1 FAILED;
    handle 1.4 attempt=1 due_s=1
a deferral that counts an attempt: send hard do=DEFER; handle 1.1 DEFERRED;
    handle 1.4 attempt=2 due_s=1.35
a deferral without its delay: send hard do=DEFER; handle 1.1 DEFERRED; handle 1.15 due_s=1.15
in another topic: send; handle 1.1; handle 1.1 topic=async
sent by nobody: handle 1 number=99
a deferral that counted: send windows; handle 40.1 due_s=40 attempt=2
read ahead, and counted: send; handle 5.1 attempt=2; freeze 2 1 4
read ahead by the killed, and counted: send; handle 5.1 attempt=2; send at_s=0.5;
    handle 5.1 attempt=2; kill 2 1.1
counted twice at a kill: send; handle 5.1 attempt=3; kill 2 1.1
a call failed: fail
a call failed long after a fault: fail; fault server-stop server 8 10
a call failed, and a fault was skipped: fail; fault server-stop server 19 21 skipped=yes
a call failed in a fault with TopicFull: fail TopicFull; fault server-kill server 19 24
a call failed in a fault with KeyError: fail KeyError; fault server-kill server 19 24
a call failed in a fault with Unanswered 500: fail "Unanswered 500"; kill 9 19 gateway-1
another role was rolled: fail Unanswered; fault roll server 19 24 rolled=manager-1
cancelled after it was handled: send; handle 1.1; cancel 1.2
a new id that is known: send answer=d; handle 1.1
accepted twice: send due=+3000; again 0.1 +3000 a; handle 3.2
replaced, and accepted as new: send; replace 0.5 +1000 a; handle 1.6
garbage without a reason: send; stay garbage
poison in garbage too soon: send hard do=POISON; handle 1.1 FAILED attempt=1;
    handle 2.1 FAILED attempt=2; stay garbage
discarded by nobody: send hard do=DISCARD; stay garbage
found by fsck: finding no-place
a body too many: bodies 1
a tick of no schedule: ticks 1,2 1,2,5
a schedule that changed: ticks 1,2 1,2 version=2
ticks that were counted twice: ticks 1,2 1,2 sent=3
ticks that fsck finds: ticks 1,2 1,2 findings=other
a finding that trim cannot cause: repaired trim second-place
damage that was repaired before: repaired delete-bodies no-body; repaired trim no-body 10
damage that comes again: repaired trim entry-lost; repaired_again entry-lost 40
a process that ended: end manager-1 'by itself' 0
a process that ignored SIGTERM: end consumer-1 'told to' -15
a process that was killed: kill 8 5 producer-1; end producer-1 'told to' -9
an error that was only logged: log trouble; log error
a group of errors that was only logged: log group
the server's memory grows: grows 'server used MB' 50 200
a role's memory grows: grows 'consumer-1 rss MB' 50 200
the keys grow: grows keys 50000 200000

== clean
expired: send ttl_ms=500; count expired=1
expired in a fault: send ttl_ms=500; count expired=1; in_time 10; fault cut consumer 0.5 0.6
put off, but the server lost it: send; move 0.5 +3000; loss 0.3 0.8; handle 1.1
a little late: send; handle 3.9
late because of a stall: send due=+20000; handle 29; stall 21 23
restored, answer a: send bulk at_s=5 due=+20000 answer=a; loss 4 8; handle 40
restored, answer none: send bulk at_s=5 due=+20000 answer=none; loss 4 8; handle 40
shortly past its ttl: send ttl_ms=500; handle 2.4
as its window opens: send windows at_s=38.999; handle 39.999 due_s=39.999
shortly after its window closed: send windows at_s=99.3; handle 100.3 due_s=100.3
stood still as its window closed: send windows at_s=98; handle 102 due_s=99; stall 99.8 101.9
killed as its handler began: send; handle 5.1 attempt=2; kill 2 1.1
killed while its handler ran: send; handle 1.1 took_s=none; handle 5.1 attempt=2; kill 2 1.2
counted before the server lost data: send; loss 1 2; handle 5.1 attempt=2
pulled, and counted: send http; handle 5.1 attempt=2
updated: send; update 0.5 +3000; handle 1.1
a retry that the third replaced: send coalesced key=4 do=RAISE; handle 1.1 FAILED;
    send coalesced key=4 at_s=0.2 answer=a2; handle 1.25; send coalesced key=4 at_s=1.26 answer=r1;
    handle 2.3
one that the next replaced: send coalesced key=4; send coalesced key=4 at_s=0.5 answer=r; handle 1.6
one that a lost send may have replaced: send coalesced key=4;
    send coalesced key=4 at_s=0.5 answer=none
in order: send ordered key=1; handle 1.1; send ordered key=1; handle 1.2
sent later, due earlier: send ordered key=1 due=+1100; send ordered key=1 at_s=1.095 due=+0;
    handle 1.11 number=before; handle 1.2
of different keys: send ordered key=1 due=+1100; handle 1.1; send ordered key=2; handle 1.3
as many as may: limited 2 key=1; limited 2 key=2; limited 2 key=3
two, the lease of one was lost: freeze 2 1.2 5.5; send ordered key=1; handle 1.1 took_s=6;
    handle 4.6 process=3 attempt=2; send ordered key=1 due=+4000; handle 5 process=3
out of order, as the server lost data: loss 2 3; send ordered key=1 do=RAISE; handle 1.1 FAILED;
    send ordered key=1 at_s=4 due=+500; handle 4.6; handle 4.8 number=before attempt=2
out of order, as its entry was deleted: send ordered key=1 do=RAISE; handle 1.1 FAILED;
    fault trim ordered/lisa 0.5 0.6 messages=this; send ordered key=1; handle 1.2;
    handle 1.4 number=before attempt=2
late in a lane that others use: send ordered key=1 do=SLOW; handle 1.1 took_s=2.5;
    send ordered key=1; handle 5 took_s=0.3
debounced, and due before: send coalesced key=5; handle 0.5 due_s=0.4
updated in flight: send; update 1.05 +1000 f; handle 1.2 number=old; handle 2.2
replaced in flight, and begun after that: send; replace 1.05 +1000 f; handle 1.2 number=old;
    handle 2.2
cancelled at an unknown time: send; cancel 1; handle 1.2 asked=none
cancelled after its lease was lost: send; handle 1.1 took_s=6; freeze 2 1.2 6.5; cancel 7.2
accepted again after a loss: send due=+3000; loss 0 0.5; again 0.6 +1000 a; handle 1.7 due_s=1.6
accepted again after its body was deleted: send due=+3000;
    fault delete-bodies fickle 0.2 0.5 messages=this deleted=yes; again 0.6 +1000 a;
    handle 1.7 due_s=1.6
a call failed with NotReplicated: fail NotReplicated; fault server-stop server 19 21
a call failed in a stall: fail; stall 21 23
twice, the ack lost by the server: twice 1.1 30; loss 1 3
twice, its process stood still: twice; stall 1 4
twice, the other process frozen: twice; freeze 3 0.9 4.9
deferred: send hard do=DEFER; handle 1.1 DEFERRED; handle 1.3 DEFERRED due_s=1.25;
    handle 1.5 due_s=1.45
a retry after an unknown time: send hard do=RAISE; handle 1.1 FAILED unsure_s=0.06;
    handle 1.2 attempt=2 unsure_s=0.06
a retry that was moved: send hard do=RAISE; handle 1.1 FAILED; move 1.15 +0; handle 1.17 attempt=2
poison whose attempts a fault used up: send hard do=POISON; handle 2.1 FAILED attempt=2;
    stay garbage; kill 2 2.05
ticks of an earlier build: fault roll server 0.5 2; ticks 1700000001000,1700000003000 1700000003000
damage that is not repaired yet: repaired trim no-body 10; fault delete-bodies fickle 5 5.5
damage that comes again with the server's data: repaired trim entry-lost;
    repaired_again entry-lost 40; loss 4 7
processes that end: end manager-1 'told to' 0; end consumer-1 killed -9;
    end producer-1 'told to' -15 age_s=0.5; kill 9 5 producer-1; end producer-1 'told to' -9
errors in logs: log trouble; log torn; log error archive-1.log
what may grow: grows garbage 10 1000; grows 'server used MB' 20 30
a short run: grows keys 0 200000 seconds=500
"""
"""For each outcome: cases, and the steps of their stories, which are methods of `Papers`.

Those without a finding are rare in a run: a checker that accuses Lisa of what every run contains
fails the tests of the run itself. Times are in seconds from the beginning. The last message sent is
`this`, the one sent before it `before`; `old` is the one that it replaced.
"""


def us(seconds: float) -> int:
    return BEGAN_US + round(seconds * 1e6)


class Papers:
    """The files that a run would leave, written step by step."""

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
        self.number, self.before, self.old, self.topic = 0, 0, 0, "fickle"
        self._dues: dict[int, float] = {}
        for number, role in enumerate(("producer-1", "consumer-1", "consumer-2"), SENDER):
            self.event("start", 0, role=role, number=number)

    def tell(self, story: str) -> None:
        for step in story.split(";"):
            verb, *words = shlex.split(step)
            named = dict(word.split("=") for word in words if "=" in word)
            values = [self._value(word) for word in words if "=" not in word]
            getattr(self, verb)(*values, **{name: self._value(named[name]) for name in named})

    def _value(self, word: str) -> Any:
        known = {"none": None, "this": self.number, "before": self.before, "old": self.old}
        try:
            return known[word] if word in known or word[0] == "+" else json.loads(word)
        except (KeyError, ValueError):  # +1000 is a delay
            return word

    def event(self, event: str, at_s: float, **fields: Any) -> None:
        self.events.append({"event": event, "at": us(at_s), **fields})

    def fault(self, kind: str, target: str, since_s: float, until_s: float, **more: Any) -> None:
        for name in ("messages", "numbers", "rolled"):
            if name in more:
                value = more[name]
                more[name] = value.split(",") if isinstance(value, str) else [value]
        span = {"since": us(since_s), "until": us(until_s)}
        self.event("fault", until_s, kind=kind, target=target, **span, **more)

    def kill(self, process: int, at_s: float, role: str = "consumer-1") -> None:
        self.fault("kill-consumer", role, at_s, at_s + 1, numbers=process, killed=us(at_s))

    def freeze(self, process: int, since_s: float, until_s: float) -> None:
        self.fault("freeze-consumer", "consumer-1", since_s, until_s, numbers=process)

    def repaired(self, kind: str, found: str, at_s: float = 5) -> None:
        """The run damages a topic, and has fsck repair it."""
        self.fault(kind, "fickle/lisa", at_s, at_s + 1, repaired={"fickle": {found: 3}})

    def repaired_again(self, found: str, at_s: float) -> None:
        self.event("repair", at_s, repaired={"fickle": {found: 1}})

    def stall(self, since_s: float, until_s: float) -> None:
        self.stalls.append(f"{us(since_s)}\t{us(until_s)}")

    def loss(self, since_s: float, until_s: float) -> None:
        self.event("loss", until_s, since=us(since_s), until=us(until_s))

    def end(self, role: str, how: str, code: int, age_s: float = 60.0) -> None:
        self.event("end", 1, role=role, number=9, how=how, code=code, age_s=age_s)

    def log(self, what: str, name: str = "consumer-1.log") -> None:
        self.logs[name] = self.logs.get(name, "") + LOGS[what]

    def grows(self, name: str, first: float, last: float, seconds: int = 1200) -> None:
        self.event("load", 0)
        self.event("sent", seconds)
        for at in range(0, seconds + 1, 5):
            found = {name: first + (last - first) * at / seconds}
            self.samples.append({"at": us(at), "found": found})

    # What a sender writes

    def send(
        self,
        topic: str = "fickle",
        *,
        at_s: float = 0.0,
        due: str | int = "+1000",
        do: str = "OK",
        ttl_ms: int = 0,
        key: int = 0,
        answer: str | None = "a",
    ) -> None:
        self.before = self.number
        self._begin(topic, str(due), at_s)
        fields = topic_number(topic), self.number, 1, int(Do[do]), due, ttl_ms, key
        if answer and topic == "coalesced":
            answer += "1"[len(answer) - 1 :]  # the first of the two ids
        self._call("S", at_s, answer, *fields)

    def _begin(self, topic: str, due: str, at_s: float) -> None:
        self.number, self.topic = number_of(SENDER, len(self._dues)), topic
        self._due(due, at_s)

    def _due(self, due: str, at_s: float) -> None:
        since_us = us(at_s) if due.startswith("+") else 0
        self._dues[self.number] = (since_us + int(due) * 1000 - BEGAN_US) / 1e6

    def cancel(self, at_s: float, answer: str | None = "c") -> None:
        self._call("X", at_s, answer, self.number)

    def move(self, at_s: float, due: str, answer: str | None = "r") -> None:
        if answer == "r":
            self._due(due, at_s)
        self._call("R", at_s, answer, self.number, due)

    def again(self, at_s: float, due: str, answer: str | None = "d") -> None:
        self._call("D", at_s, answer, self.number, due)

    def replace(self, at_s: float, due: str, answer: str | None = "r") -> None:
        self.old = self.number
        self._begin("fickle", due, at_s)
        self._call("P", at_s, answer, topic_number("fickle"), self.number, self.old, due)

    def update(self, at_s: float, due: str, answer: str | None = "u") -> None:
        self.old = self.number
        self._begin("fickle", due, at_s)
        if answer == "u":
            self._dues[self.number] = self._dues[self.old]
        self._call("U", at_s, answer, topic_number("fickle"), self.number, self.old, due)

    def _call(self, kind: str, at_s: float, letter: str | None, *fields: object) -> None:
        """No letter: an error, four seconds later, that a fault explains."""
        call = len(self.sent)
        self.sent.append("\t".join(map(str, (kind, call, us(at_s), *fields))))
        if letter is None:
            self.sent.append(f"E\t{call}\t{us(at_s + 4)}\t0\tServerUnavailable")
            self.fault("hang", "producer", at_s, at_s + 3)
        else:
            self.sent.append(f"C\t{call}\t{us(at_s + 0.01)}\t{letter}")

    def fail(self, error: str = "ServerUnavailable") -> None:
        """A send at 20 s ends in an error at 24 s, without any fault."""
        if error.startswith("Unanswered"):
            self.events[0]["role"] = "producer-http"
        self.send(at_s=20.0, answer=None)
        self.events.pop()
        self.sent[-1] = self.sent[-1].replace("ServerUnavailable", error)

    # What a handler writes

    def handle(
        self,
        at_s: float,
        verdict: str = "OK",
        *,
        number: int | None = None,
        took_s: float | None = 0.001,
        topic: str = "",
        group: str = "lisa",
        attempt: int = 1,
        due_s: float | None = None,
        asked: str | None = "yes",
        unsure_s: float = 0.0,
        process: int = HANDLER,
    ) -> None:
        """It began up to `unsure_s` after `at_s`, and ended up to that before its end."""
        number = self.number if number is None else number
        if due_s is None:  # the due time asked for, unless the test sets a wrong one
            due_s = min(at_s, self._dues.get(number, at_s)) if attempt == 1 else at_s
        end = end_from = 0
        if took_s is not None:
            end, end_from = us(at_s + took_s), us(at_s + took_s - unsure_s)
        begin, begin_by = us(at_s), us(at_s + unsure_s)
        code = int(Verdict.BEGUN if took_s is None else Verdict[verdict])
        place, was_asked = place_number(topic or self.topic, group), int(asked is not None)
        line = number, place, attempt, us(due_s) // 1000, begin, end, code, was_asked
        fields = map(str, (*line, begin_by, end_from))
        self.handled.setdefault(process, []).append("\t".join(fields))

    def twice(self, first_s: float = 1.1, second_s: float = 5) -> None:
        """A message is handled successfully by two processes."""
        self.send()
        self.handle(first_s)
        self.handle(second_s, attempt=2, process=OTHER)

    def limited(self, n: int, key: int) -> None:
        """So many of a key are handled at once."""
        for _ in range(n):
            self.send("limited", key=key, do="SLOW")
            self.handle(1.1, took_s=0.3)

    def in_time(self, n: int) -> None:
        """Messages are handled right when they are due."""
        for _ in range(n):
            self.send()
            self.handle(1.02, due_s=1.0)

    # The final state

    def stay(self, state: str, group: str | None = "lisa") -> None:
        live = {"number": self.number, "topic": self.topic, "group": group, "state": state}
        self.final["live"].append({**live, "id": "x", "attempts": 1, "reason": "ack timeout"})
        self.final["bodies"] += 1

    def bodies(self, n: int) -> None:
        self.final["bodies"] = n

    def finding(self, kind: str) -> None:
        self.final["findings"].append({"kind": kind, "topic": "fickle", "id": "1-0", "what": ""})

    def archive(self) -> None:
        """The message must be restored if the server loses it."""
        self.archived.append(self.number)

    def count(self, **stats: int) -> None:
        self.stats.update(stats)

    def ticks(self, expected: str, found: str | int, *, findings: str = "", **more: Any) -> None:
        due, made = ([int(tick) for tick in str(said).split(",")] for said in (expected, found))
        schedule = {"version": 1, "behind_ms": 0, "expected": due, "found": made, **more}
        counts = {"sent": len(made), **more, "findings": findings.split()}
        self.final["ticks"] = {"schedules": {"s": schedule}, **counts}

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
        texts = {name: "".join(f"{line}\n" for line in lines) for name, lines in files.items()}
        texts |= {f"logs/{name}": text for name, text in self.logs.items()}
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
        return load(out)


def outcome(verdicts: Verdicts) -> str:
    guilty = [kind for kind, found in verdicts.guilty.items() for _ in found]
    excused = [f"{kind} excused" for kind, found in verdicts.excused.items() for _ in found]
    return ", ".join(guilty + excused) or "clean"


SECTIONS = [section.splitlines() for section in STORIES.replace("\n    ", " ").split("\n== ")[1:]]


@pytest.mark.parametrize(
    ("expected", "case"),
    [(expected, case) for expected, *cases in SECTIONS for case in cases if case],
)
def test_verdicts(tmp_path: Path, expected: str, case: str) -> None:
    papers = Papers()
    papers.tell(case.partition(": ")[2])
    verdicts = check(papers.run(tmp_path))
    assert outcome(verdicts) == expected, verdicts


def test_messages_and_handlings_are_named_and_counted(tmp_path: Path) -> None:
    p = Papers()
    p.tell("freeze 2 2 4; count deferred@lisa=3; send; handle 1.1; send; handle 1.1 process=3")
    p.tell("send due=+30000; handle 30.1; send; send windows; handle 40.1 due_s=40")
    p.tell("send hard do=SLOW; handle 50 took_s=none; handle 50 took_s=0.3")
    p.tell("send two; handle 1.1 group=west; log trouble; log error")
    verdicts = check(p.run(tmp_path))
    [lost, other] = verdicts.guilty["lost"]
    assert lost.what == "fickle/lisa, OK"
    assert (other.number, other.what) == (p.number, "two/east, OK")
    [error] = verdicts.guilty["unexplained"]
    assert error.what == "consumer-1.log:8: ValueError: no"
    counts = verdicts.counts
    assert (counts["confirmed"], counts["handlings"]) == (7, 6)
    assert counts["handlings held to account"] == 4  # all but two around the freeze
    assert (counts["handlings with a window"], counts["deferred"]) == (1, 3)


def test_many_messages_in_a_call_and_torn_lines(tmp_path: Path) -> None:
    p, first = Papers(), number_of(SENDER, 0)
    p.sent += [
        f"S\t1\t{us(0)}\t0\t{first}\t3\t0\t+1000,+2000,+3000\t0\t0",
        f"C\t1\t{us(0.1)}\ta",
        f"S\t2\t{us(0)}\t0\t{first + 3}\t3\t0\t+1000\t0\t0",
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
    p.tell("send; handle 1.501 due_s=1.5; send; handle 1.602 due_s=1.6; send; handle 12.5 due_s=9")
    p.tell(
        "send hard do=SLOWER; handle 1.003 took_s=none; kill 2 4; handle 8.5 process=3 attempt=2"
    )
    run = p.run(tmp_path)
    found = lateness(run, [Window(us(4), us(14), "kill-consumer")])
    assert found["outside faults"]["p50"] == 2
    assert found["inside faults"]["max"] == 3_500
    again = redelivery(run, [Window(us(4), us(5), "kill-consumer")])
    assert again["alone"]["max"] == 1.5  # ack timeouts
