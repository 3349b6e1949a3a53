"""The faults of a run: drawn from a seed, and made one step after the other.

The same seed and options give the same faults. What a fault affected is noted when it begins and
ends: `numbers` are processes, `places` groups of topics, `messages` individual messages.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from lisa.core.model.envelope import decode_content
from lisa.core.model.errors import InvalidMessage, LisaError, ServerUnavailable
from tests.torture.proxy import Trouble
from tests.torture.stage import now_us
from tests.torture.world import ACK_S, TOPICS, place_number

if TYPE_CHECKING:
    from tests.torture.__main__ import Options
    from tests.torture.stage import Process, Stage

FIRST_S, LAST_S = 4.0, 3.0
STEP_S = 0.1
CUT_AGAIN_S = 0.2
ROLL_PAUSE_S = 0.5
STARTS, START_AGAIN_S = 10, 0.5
REPAIR_TRIES = 10
FINDS_TRIES, MOVES_AFTER, FINDS_AGAIN_S = 60, 10, 0.05
TOLD = 20
PLACES = [f"{topic.name}/{group}" for topic in TOPICS for group in topic.groups]


class Fault(NamedTuple):
    """One fault, `at_s` after the load began, for `seconds`."""

    at_s: float
    kind: str
    target: str
    seconds: float
    amount: int = 0


Touched = dict[str, Any]
Maker = Callable[["Stage", Fault, Touched], Iterator[float]]
"""Makes a fault: yields the pause until its next step."""


def _running(stage: Stage, fault: Fault, touched: Touched) -> Process | None:
    process = stage.roles[fault.target].now
    if process is None or process.poll() is not None:
        touched["skipped"] = "it does not run"
        return None
    touched["numbers"] = [process.number]
    return process


def _kill(stage: Stage, fault: Fault, touched: Touched) -> Iterator[float]:
    role = stage.roles[fault.target]
    if process := _running(stage, fault, touched):
        process.kill()
        process.wait()
        touched["killed"] = now_us()
        role.is_wanted = False
        stage.ended(process, "killed")
        yield fault.seconds
        role.is_wanted = True
        if not role.is_alive():
            stage.start(role)
        while role.kind == "gateway" and role.is_alive() and not stage.is_gateway_open:
            yield STEP_S  # until then it cannot be reached


def _stop(stage: Stage, fault: Fault, touched: Touched) -> Iterator[float]:
    if process := _running(stage, fault, touched):
        process.send_signal(signal.SIGSTOP)
        yield fault.seconds
        process.send_signal(signal.SIGCONT)


def _clock(stage: Stage, fault: Fault, touched: Touched) -> Iterator[float]:
    """Replace a process by one whose clock is an hour off."""
    role = stage.roles[fault.target]
    role.shift_s = fault.amount
    if not (yield from _replace(stage, fault.target)):
        role.shift_s = 0
        touched["skipped"] = "it does not run"
        return
    touched["shift"] = fault.amount
    yield fault.seconds
    role.shift_s = 0
    yield from _replace(stage, fault.target)


def _replace(stage: Stage, name: str) -> Generator[float, None, bool]:
    """Replace a role's process; returns whether there was one to end."""
    role = stage.roles[name]
    process = role.now
    if process is None or not role.is_alive() or not role.is_wanted:
        return False
    role.tell_to_leave()
    while process.poll() is None:
        yield STEP_S
    stage.ended(process, "told to")
    role.is_wanted = True
    if not role.is_alive():
        stage.start(role)
    return True


def _roll(stage: Stage, _fault: Fault, touched: Touched) -> Iterator[float]:
    """Restart every role, so far on an earlier build, on this one."""
    touched["rolled"] = []
    for name, role in stage.roles.items():
        role.build = None
        if (yield from _replace(stage, name)):
            touched["rolled"].append(name)
        yield ROLL_PAUSE_S


def _kill_server(stage: Stage, fault: Fault, touched: Touched) -> Iterator[float]:
    stage.kill_server()
    yield fault.seconds
    for attempt in range(1, STARTS + 1):
        touched["starts"] = attempt
        try:
            stage.restart_server()
            return
        except ServerUnavailable:  # the machine is too busy
            if attempt == STARTS:
                raise
        yield START_AGAIN_S


def _stop_server(stage: Stage, fault: Fault, _touched: Touched) -> Iterator[float]:
    stage.signal_server(signal.SIGSTOP)
    yield fault.seconds
    stage.signal_server(signal.SIGCONT)


def _flush(stage: Stage, _fault: Fault, _touched: Touched) -> Iterator[float]:
    stage.client.script_flush()
    yield 0


def _fill(stage: Stage, fault: Fault, touched: Touched) -> Iterator[float]:
    """Set maxmemory below the memory already used."""
    touched["maxmemory"] = int(stage.client.info("memory")["used_memory"]) // 2
    stage.client.config_set("maxmemory", touched["maxmemory"])
    yield fault.seconds
    stage.client.config_set("maxmemory", 0)


def _cut(stage: Stage, fault: Fault, touched: Touched) -> Iterator[float]:
    touched["cuts"] = 1 + int(fault.seconds / CUT_AGAIN_S)
    for _ in range(touched["cuts"]):
        stage.proxy.cut(fault.target)
        yield CUT_AGAIN_S


def _trouble(stage: Stage, fault: Fault, _touched: Touched) -> Iterator[float]:
    trouble = Trouble("lose" if fault.kind == "lose-replies" else fault.kind)
    stage.proxy.make(trouble, fault.target, delay_s=fault.amount / 1000)
    yield fault.seconds
    stage.proxy.make(Trouble.NONE, fault.target)


# Damage that another program does to Redis, and how an operator repairs it

Work = Callable[["Stage", Fault], "Touched | None"]
"""Does the damage; None: there is nothing to do now."""


def _foreign(work: Work) -> Maker:
    """A fault made by another program; later an operator has fsck repair it.

    It waits for messages to damage; if none arrive, it moves from place to place.
    """

    def make(stage: Stage, fault: Fault, touched: Touched) -> Iterator[float]:
        others = PLACES if "/" in fault.target else [topic.name for topic in TOPICS]
        done = None
        for attempt in range(FINDS_TRIES):
            if attempt >= MOVES_AFTER:
                fault = fault._replace(target=others[attempt % len(others)])
            touched["target"], touched["since"] = fault.target, now_us()
            with suppress(redis.RedisError, LisaError):
                done = work(stage, fault) if stage.is_up else None
            if done is not None:
                break
            yield FINDS_AGAIN_S
        else:
            touched["skipped"] = "there was nothing to take"
            return
        touched |= done
        yield fault.seconds
        for _ in range(REPAIR_TRIES):  # another fault may be active: the server is down, or full
            found = yield from repair(stage, [fault.target.partition("/")[0]])
            if found is not None:
                touched |= found
                return

    return make


def trim(stage: Stage, fault: Fault) -> Touched | None:
    """Delete entries of a ready stream, unread or in flight: by XTRIM, or one by one by XDEL."""
    topic, group, stream = _place(stage, fault.target)
    rows = stage.store.ask("XRANGE", stream, "-", "+", "COUNT", fault.amount)
    entries = [entry.decode() for entry, _ in rows]
    numbers = _numbers_of(stage, topic, [fields[1] for _, fields in rows])
    if not numbers:
        return None
    if fault.amount % 2:
        stage.client.xdel(stream, *entries)
    else:
        ms, _, serial = entries[-1].partition("-")
        stage.client.execute_command("XTRIM", stream, "MINID", "=", f"{ms}-{int(serial) + 1}")
    return {"messages": numbers, "places": [place_number(topic, group)]}


def delete_bodies(stage: Stage, fault: Fault) -> Touched | None:
    keys = stage.store.keys.topic(fault.target)
    ids: list[bytes] = stage.store.ask("ZRANDMEMBER", keys.waiting, fault.amount)
    if not ids:
        return None
    bodies = [keys.body(name.decode()) for name in ids]
    # Together: another message may replace one of them at any moment.
    both = stage.client.pipeline(transaction=True)
    both.mget(bodies)
    both.unlink(*bodies)
    numbers = numbers_in(both.execute()[0])
    return {"messages": numbers, "deleted": True} if numbers else None


def delete_consumer(stage: Stage, fault: Fault) -> Touched | None:
    """Delete a consumer with its in-flight messages: XGROUP DELCONSUMER forgets them."""
    topic, group, stream = _place(stage, fault.target)
    rows = stage.client.xinfo_consumers(stream, group)
    name = next((row["name"] for row in rows if row["pending"]), None)
    if name is None:
        return None
    both = stage.client.pipeline(transaction=True)
    both.xpending_range(stream, group, "-", "+", 10_000, name)
    both.xgroup_delconsumer(stream, group, name)
    held = [row["message_id"] for row in both.execute()[0]]
    entries = [stage.store.ask("XRANGE", stream, entry, entry) for entry in held]
    numbers = _numbers_of(stage, topic, [rows[0][1][1] for rows in entries if rows])
    # Otherwise its messages had been handled, and none is missing.
    return {"messages": numbers, "places": [place_number(topic, group)]} if numbers else None


def destroy_group(stage: Stage, fault: Fault) -> Touched | None:
    """Destroy the stream's group; all its in-flight messages are delivered again."""
    topic, group, stream = _place(stage, fault.target)
    if not stage.client.xgroup_destroy(stream, group):
        return None
    return {"places": [place_number(topic, group)], "redelivers": True}


def repair(stage: Stage, topics: Sequence[str]) -> Generator[float, None, Touched | None]:
    """Run `lisa fsck --repair` in a separate process: in this one it would block the proxy.

    Yields the pause until the next check. Returns the begin of the repair, and the findings by
    topic: their numbers by kind, and some of them in words. None: it failed.
    """
    began = now_us()
    out = stage.out / "logs" / f"fsck-{began}.json"  # two may be running
    command = ["-m", "lisa.cli.main", "fsck", *topics, "--repair", "--json"]
    process = stage.process([*command, "--redis", stage.server.url], "fsck", out)
    while process.poll() is None:
        yield STEP_S
    if process.returncode not in (0, 1):  # 1: some finding cannot be repaired
        return None
    kinds: dict[str, Counter[str]] = {topic: Counter() for topic in topics}
    words: dict[str, list[str]] = {topic: [] for topic in topics}
    for found in json.loads(out.read_bytes())["findings"]:
        kinds[found["topic"]][found["kind"]] += 1
        words[found["topic"]].append(" ".join(str(word) for word in found.values() if word))
    told = {topic: found[:TOLD] for topic, found in words.items()}
    return {"repairing": began, "repaired": kinds, "found": told}


def _numbers_of(stage: Stage, topic: str, ids: Iterable[bytes]) -> list[int]:
    keys = stage.store.keys.topic(topic)
    bodies = [keys.body(name.decode()) for name in ids]
    return numbers_in(stage.store.ask("MGET", *bodies)) if bodies else []


def numbers_in(envelopes: Sequence[bytes | None]) -> list[int]:
    """The numbers of messages; missing envelopes, and those without a message, have none."""
    numbers = []
    for data in envelopes:
        with suppress(InvalidMessage):
            if data is not None:
                numbers.append(int(decode_content(data)[0][0]))
    return numbers


def _place(stage: Stage, target: str) -> tuple[str, str, str]:
    topic, _, group = target.partition("/")
    return topic, group, stage.store.keys.topic(topic).group(group).ready


# All kinds


class Kind(NamedTuple):
    """How one kind of fault is made and drawn.

    targets: kinds of roles, `door`, `place`, `topic`, or `server`.
    alone: the next fault waits for its end.
    """

    make: Maker
    targets: Sequence[str]
    shortest_s: float = 0.0
    longest_s: float = 0.0
    amounts: Sequence[int] = (0,)
    alone: bool = False


GATEWAY = ("gateway", "puller")
KINDS: dict[str, Kind] = {
    "kill-manager": Kind(_kill, ["manager"], 0.1, 3),
    "kill-consumer": Kind(_kill, ["consumer"], 0.1, 3),
    "kill-producer": Kind(_kill, ["producer"], 0.1, 3),
    "kill-gateway": Kind(_kill, GATEWAY, 0.1, 3),
    "stop-manager": Kind(_stop, ["manager"], 0.2 * ACK_S, 0.9 * ACK_S),
    "stop-consumer": Kind(_stop, ["consumer"], 0.2 * ACK_S, 0.9 * ACK_S),
    "stop-producer": Kind(_stop, ["producer"], 0.2 * ACK_S, 0.9 * ACK_S),
    "stop-gateway": Kind(_stop, GATEWAY, 0.2 * ACK_S, 3 * ACK_S),
    "freeze-manager": Kind(_stop, ["manager"], 1.2 * ACK_S, 3 * ACK_S),
    "freeze-consumer": Kind(_stop, ["consumer"], 1.2 * ACK_S, 3 * ACK_S),
    "freeze-producer": Kind(_stop, ["producer"], 1.2 * ACK_S, 3 * ACK_S),
    "clock": Kind(_clock, ["consumer", "producer", "manager"], 5, 15, (-3600, 3600)),
    "server-kill": Kind(_kill_server, ["server"], 0.05, ACK_S, alone=True),
    "server-stop": Kind(_stop_server, ["server"], 0.2, 0.8 * ACK_S, alone=True),
    "script-flush": Kind(_flush, ["server"]),
    "out-of-memory": Kind(_fill, ["server"], 0.5, ACK_S, alone=True),
    "cut": Kind(_cut, ["door"], 0, 2),
    "delay": Kind(_trouble, ["door"], 1, 5, (20, 100, 400)),
    "refuse": Kind(_trouble, ["door"], 0.5, ACK_S),
    "hang": Kind(_trouble, ["door"], 0.5, 2.5 * ACK_S),
    "lose-replies": Kind(_trouble, ["door"], 0.5, 3),
    "trim": Kind(_foreign(trim), ["place"], 0.3, 2, (5, 20, 100)),
    "delete-bodies": Kind(_foreign(delete_bodies), ["topic"], 0.3, 2, (1, 3, 10)),
    "delete-consumer": Kind(_foreign(delete_consumer), ["place"], 0.3, 2),
    "destroy-group": Kind(_foreign(destroy_group), ["place"]),
    "roll": Kind(_roll, ["server"], alone=True),
}
"""Every kind of fault. `roll` restarts all roles, one after the other, from an earlier build."""


def begin(stage: Stage, fault: Fault) -> Iterator[float]:
    """The steps of a fault, noted from begin to end; an impossible fault is skipped."""
    touched: Touched = {"kind": fault.kind, "target": fault.target, "since": now_us()}
    how = "skipped"
    try:
        for pause in KINDS[fault.kind].make(stage, fault, touched):
            yield pause
            how = "failed"  # half done
    except (redis.RedisError, LisaError, OSError) as error:
        touched[how] = f"{type(error).__name__}: {error}"
    touched["until"] = now_us()
    stage.note("fault", **touched)


def choose(said: str, *, earlier: bool, gateway: bool) -> list[str]:
    """The kinds that `all`, `none`, or a list such as `kill-*,cut` selects. Raises ValueError."""
    possible = [
        kind
        for kind in KINDS
        if (earlier or kind != "roll") and (gateway or not kind.endswith("-gateway"))
    ]
    if said in ("all", "none"):
        return possible if said == "all" else []
    chosen = []
    for pattern in said.split(","):
        found = [kind for kind in possible if fnmatch(kind, pattern)]
        if not found:
            raise ValueError(f"no fault is called {pattern!r}; there are {', '.join(possible)}")
        chosen += found
    return list(dict.fromkeys(chosen))


def draw(options: Options) -> list[Fault]:
    """Faults in order of time, `every_s` apart on average; each kind once before any recurs."""
    chance = random.Random(options.seed)
    targets = {
        **options.roles,
        "server": ["server"],
        "door": ["manager", "consumer", "producer", *["gateway"] * options.gateway, "*"],
        "topic": [topic.name for topic in TOPICS],
        "place": PLACES,
    }
    faults: list[Fault] = []
    at_s, deck = FIRST_S, list[str]()
    while at_s < options.seconds - LAST_S:
        if not deck:
            rolled = any(fault.kind == "roll" for fault in faults)
            deck = [kind for kind in options.kinds if kind != "roll" or not rolled]
            chance.shuffle(deck)
            if not deck:
                break
        name = deck.pop()
        kind = KINDS[name]
        seconds = round(chance.uniform(kind.shortest_s, kind.longest_s), 2)
        target = chance.choice([target for group in kind.targets for target in targets[group]])
        faults.append(Fault(round(at_s, 2), name, target, seconds, chance.choice(kind.amounts)))
        at_s += options.every_s * chance.uniform(0.5, 1.5) + seconds * kind.alone
    return faults
