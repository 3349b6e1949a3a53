"""The server's data must match the model after each operation, on several topics.

Hypothesis draws random operations, and shrinks a failure to its shortest form. By default it draws
some thousands of steps, the same each time; `LISA_MODEL_STEPS=100000 pytest tests/model` draws
that many, different each time. Random steps may miss a rare answer, so a tour reaches each one.
"""

from collections import Counter

from hypothesis import Phase

from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.lease import Begun
from lisa.embedded import EmbeddedServer
from tests.model.draws import FAR, HOUR, OVERLAPS, run_machine
from tests.model.machine import Machine
from tests.model.scheduling import Made
from tests.model.sending import Outgoing

STEPS_OF_ONE_RUN = 50


def test_the_queue_is_as_the_model_says(valkey_server: EmbeddedServer) -> None:
    phases = Phase.generate, Phase.shrink
    seen = run_machine(Machine, STEPS_OF_ONE_RUN, *phases, url=valkey_server.url)
    assert seen["steps"] >= 2_000


KEEP = OnDuplicate.KEEP
ALL = list(range(12))
ANSWERS = """\
Enqueue: accepted, duplicate, rejected, replaced, replaced_in_flight, updated
Enqueue: refused: full, refused: large
cancel: cancelled, in_flight, done, unknown
reschedule: rescheduled, in_flight, done, unknown
get: waiting, ready, in_flight, retry, acked, cancelled, purged
Ack: acked, late, stale, repeated, refused: no such group
Fail: retrying, dead, stale, repeated
Promote:: moved, full, expired
Reclaim: retrying, dead, repeated
Reclaim:: cleared, returned
Postpone: deferred, released, stale, repeated
Declare: True, False, refused: removal unfinished, repeated
Expire: expired, in_flight, not_due, skipped, garbage, kept, repeated
Release: True, False, repeated
Extend: True, False
Requeue: True, False, repeated
Purge: True, False, repeated
Trim: True, False
Schedule: done, held, changed, refused: full, repeated
Pull: repeated
"""
"""The answers to reach, by the names under which the stage counts them."""


def test_every_answer_is_met(valkey_server: EmbeddedServer) -> None:
    seen: Counter[str] = Counter()
    play = type("Machine", (Machine,), {"url": valkey_server.url, "seen": seen})()
    try:
        play.three_topics([Outgoing("b", "1000"), Outgoing("c", FAR)], None, "0", "0")
        tours = (sends, failures, deliveries, ends, lates, schedules, groups, a_foreign_hand)
        for tour in tours:
            tour(play)
            look_at_all(play)
    finally:
        play.teardown()
    lines = (line.partition(": ") for line in ANSWERS.splitlines())
    wanted = [f"{name} {answer}" for name, _, answers in lines for answer in answers.split(", ")]
    never = [one for one in wanted if not seen[one]]
    assert not never, f"never reached: {never}"


def look_at_all(play: Machine) -> None:
    for topic in play.stage.topics:
        for pick in ALL:
            play.look(topic, pick)


def fire_all(play: Machine) -> None:
    for pick in ALL:
        play.fire_now("plain", pick)


def sends(play: Machine) -> None:
    """Known ids; too large a message; a full group."""
    play.configure("plain", {"max_ready": "1", "max_body_bytes": "4"}, declared=False)
    for mode in OnDuplicate:
        play.send("plain", [Outgoing("c", FAR), Outgoing("d", "1000")], mode)
        play.send("plain", [Outgoing("e", "1000")], mode)
    play.repeat_a_send(0)
    play.schedule_by_a_job("told", Outgoing("s", FAR))
    play.cancel("told", ALL)
    play.send("plain", [Outgoing("f", "1000", "longer")], KEEP)
    play.promote("plain", 500)
    play.configure("plain", {"capacity": "1"}, declared=False)
    play.send("plain", [Outgoing("f", "1000")], KEEP)
    play.configure("plain", {"capacity": None, "max_ready": None}, declared=False)
    play.promote("plain", 500)


def failures(play: Machine) -> None:
    """Attempts are used up; garbage, and requeue."""
    play.fail_the_latest()
    play.fail_the_latest()
    look_at_all(play)
    play.promote("told", 500)
    play.take_by_another("told", "g")
    play.fail_the_latest()
    play.requeue(0, ALL)
    play.promote("told", 500)
    play.take_by_another("told", "g")
    play.retry([7], "c", "discard")
    play.requeue(0, [5, 0])
    play.promote("told", 500)
    play.take_by_another("told", "g")
    play.retry([7], "c", "discard")
    play.purge(0, [5, 0])


def deliveries(play: Machine) -> None:
    """A message that is replaced; leases that are kept and lost, acks in time and late."""
    play.take("plain", "g", "c1", None)
    play.send("plain", [Outgoing(one, "1000") for one in "cdef"], OnDuplicate.REPLACE)
    play.promote("plain", 500)
    play.take("plain", "g", "c1", None)
    play.extend([7], "c1", int(HOUR))
    play.extend([7], "c2", None)
    play.release([7])
    play.release([7])
    play.take("plain", "g", "c2-h", None)
    play.reclaim("plain", "g", 200)
    play.take("plain", "g", "c2-h", None)
    play.extend([7], "c2-h", None, Begun.YES)
    play.reclaim("plain", "g", 200)
    play.promote("plain", 500)
    play.take("plain", "g", "c2-h", None)
    play.release([7])
    play.take("plain", "g", "c1", None)
    play.defer([7], "open window")
    play.defer([7], "window")
    play.take("plain", "g", "c1", None)
    play.defer([7], "window")
    play.defer([7], "delay")
    fire_all(play)
    play.promote("plain", 500)
    play.pull("plain", "g", "c1", 3, None)
    play.open_outside_the_window(0)
    fire_all(play)
    play.promote("plain", 500)
    play.take("plain", "g", "c1", None)
    play.cancel("plain", ALL)
    play.reschedule("plain", 0, int(FAR))
    fire_all(play)
    play.reclaim("plain", "g", 1)
    look_at_all(play)
    play.ack([7], "c", "acked")
    play.ack([7], "c", "acked")
    for _ in range(2):
        play.promote("plain", 500)
        play.take("plain", "g", "c2", None)
        play.reclaim("plain", "g", 200)
    play.send("plain", [Outgoing("g", "1000")], KEEP)
    play.take("plain", "g", "c2", None)
    play.ack_the_latest()
    play.send("plain", [Outgoing("g", FAR)], OnDuplicate.REPLACE)
    play.ack_the_latest()
    play.cancel("plain", ALL)
    fire_all(play)


def ends(play: Machine) -> None:
    """An expired ttl: of a waiting message, and of one that a group has in flight."""
    play.configure("pair", {"paused": "1"}, declared=False)
    play.send("pair", [Outgoing("h", "1000", ttl=0), Outgoing("i", "1000", ttl=int(HOUR))], KEEP)
    play.configure("pair", {"paused": "0"}, declared=False)
    play.promote("pair", 500)
    play.send("pair", [Outgoing("j", "+0", ttl=0), Outgoing("k", FAR, ttl=0)], KEEP)
    play.take("pair", "g", "c1", None)
    play.expire("pair", ALL)
    for pick in ALL:
        play.reschedule("pair", pick, int(FAR))
    play.cancel("plain", ALL)


def schedules(play: Machine) -> None:
    """Each overlap, with an earlier message in each state; a full topic; a lost race."""
    for overlap in dict.fromkeys(OVERLAPS):
        for how in ("ticks", "drops", "swaps", "ends", "removes"):
            for is_current in (True, False):
                play.change_a_schedule(
                    "told",
                    "p",
                    is_current=is_current,
                    creates=[Made(f"{overlap}-{how}", int(FAR)), Made("due", 1_000, 0, "0")],
                    drops=ALL[::2],
                    earlier=ALL[1::2],
                    overlap=overlap,
                    how=how,
                )
        play.promote("told", 500)
        play.take_by_another("told", "g")
    play.configure("told", {"capacity": "1"}, declared=False)
    play.change_a_schedule(
        "told",
        "q",
        is_current=True,
        creates=[Made("full", 1_000), Made("more", 1_000)],
        drops=[],
        earlier=[],
        overlap="allow",
        how="ticks",
    )
    play.configure("told", {"capacity": None}, declared=False)


def lates(play: Machine) -> None:
    """Messages that are too late for a late policy of their own, or of the topic."""
    play.configure("pair", {"late": f"{HOUR},collapse"}, declared=False)
    skip, bury = f"*;{HOUR},skip", f"0;{HOUR},garbage"
    mine = [Outgoing("l", "1000", policy=skip), Outgoing("m", "1000", policy=bury)]
    play.send("pair", [*mine, Outgoing("e@1", "1000"), Outgoing("e@2", "2000")], KEEP)
    play.promote("pair", 500)
    play.promote("pair", 500)
    play.configure("pair", {"late": None}, declared=False)


def groups(play: Machine) -> None:
    """A group is removed while its consumers are running, and declared again too soon."""
    play.take("told", "h", "c1", None)
    play.undeclare("told", "h", [], drop=True, begun=False)
    play.declare("told", "h")
    play.undeclare("told", "h", ALL, drop=True, begun=True)
    play.ack_the_latest()
    for _ in range(2):
        play.declare("told", "h")
    play.undeclare("told", "h", ALL, drop=True, begun=True)


def a_foreign_hand(play: Machine) -> None:
    play.reclaim("pair", "g", 200)
    play.take("pair", "g", "c1", None)
    for how in ("acknowledged", "held"):
        play.litter("g", how, seen=True)
    play.trim("pair", "g")
