"""Makes each kind of fault: a generator that yields the pause until its next step.

What a fault affected is noted when it begins and ends: `numbers` are processes, `places` groups of
topics, `messages` individual messages.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import redis

from lisa.core.model.errors import LisaError, ServerUnavailable
from tests.torture import foreign
from tests.torture.proxy import Trouble
from tests.torture.stage import now_us

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tests.torture.plan import Fault
    from tests.torture.stage import Stage

CUT_AGAIN_S = 0.2
ROLL_PAUSE_S = 0.5
STARTS, START_AGAIN_S = 10, 0.5
GATEWAY_AGAIN_S = 0.1
REPAIR_TRIES = 10
FINDS_TRIES, FINDS_AGAIN_S = 20, 0.05


def begin(stage: Stage, fault: Fault) -> Iterator[float]:
    """The steps of a fault, noted from begin to end; an impossible fault is skipped."""
    makers: dict[str, Callable[[Stage, Fault, dict[str, Any]], Iterator[float]]] = {
        "server-kill": _kill_server,
        "server-stop": _stop_server,
        "script-flush": _flush,
        "out-of-memory": _fill,
        "cut": _cut,
        "clock": _clock,
        "roll": _roll,
        "trim": _foreign(foreign.trim),
        "delete-bodies": _foreign(foreign.delete_bodies),
        "delete-consumer": _foreign(foreign.delete_consumer),
        "destroy-group": _foreign(foreign.destroy_group),
    }
    verb = fault.kind.partition("-")[0]
    by_verb = {"kill": _kill, "stop": _stop, "freeze": _stop}
    make = makers.get(fault.kind) or by_verb.get(verb) or _trouble
    touched: dict[str, Any] = {"kind": fault.kind, "target": fault.target, "since": now_us()}
    how = "skipped"
    try:
        for pause in make(stage, fault, touched):
            yield pause
            how = "failed"  # half done
    except (redis.RedisError, LisaError, OSError) as error:
        touched[how] = f"{type(error).__name__}: {error}"
    touched["until"] = now_us()
    stage.note("fault", **touched)


def _kill(stage: Stage, fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
    role = stage.roles[fault.target]
    one = role.now
    if one is None or one.poll() is not None:
        touched["skipped"] = "it does not run"
        return
    touched["numbers"] = [one.number]
    one.kill()
    touched["killed"] = now_us()
    role.is_wanted = False
    stage.ended(one, "killed")
    yield fault.seconds
    role.is_wanted = True
    if not role.is_alive:
        stage.start(role)
    while role.kind == "gateway" and role.is_alive and not stage.is_gateway_open:
        yield GATEWAY_AGAIN_S  # until then it cannot be reached


def _stop(stage: Stage, fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
    one = stage.roles[fault.target].now
    if one is None or one.poll() is not None:
        touched["skipped"] = "it does not run"
        return
    touched["numbers"] = [one.number]
    one.signal(signal.SIGSTOP)
    yield fault.seconds
    one.signal(signal.SIGCONT)


def _clock(stage: Stage, fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
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
    one = role.now
    if one is None or one.poll() is not None or not role.is_wanted:
        return False
    role.is_wanted = False
    one.tell_to_leave()
    while one.poll() is None:
        yield 0.1
    stage.ended(one, "told to")
    role.is_wanted = True
    if not role.is_alive:
        stage.start(role)
    return True


def _roll(stage: Stage, _fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
    """Restart every role, so far on an earlier build, on this one."""
    touched["rolled"] = []
    for name, role in stage.roles.items():
        role.build = role.build._replace(path=None)
        if (yield from _replace(stage, name)):
            touched["rolled"].append(name)
        yield ROLL_PAUSE_S


def _kill_server(stage: Stage, fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
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


def _stop_server(stage: Stage, fault: Fault, _touched: dict[str, Any]) -> Iterator[float]:
    stage.stop_server(resume=False)
    yield fault.seconds
    stage.stop_server(resume=True)


def _flush(stage: Stage, _fault: Fault, _touched: dict[str, Any]) -> Iterator[float]:
    stage.client.script_flush()
    yield 0


def _fill(stage: Stage, fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
    """Set maxmemory below the memory already used."""
    used = int(stage.client.info("memory")["used_memory"])
    stage.client.config_set("maxmemory", used // 2)
    touched["maxmemory"] = used // 2
    yield fault.seconds
    stage.client.config_set("maxmemory", 0)


def _cut(stage: Stage, fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
    """Cut once or repeatedly."""
    left_s = fault.seconds
    touched["cuts"] = 0
    while True:
        stage.proxy.cut(fault.target)
        touched["cuts"] += 1
        left_s -= CUT_AGAIN_S
        if left_s <= 0:
            break
        yield CUT_AGAIN_S


def _trouble(stage: Stage, fault: Fault, _touched: dict[str, Any]) -> Iterator[float]:
    trouble = Trouble("lose" if fault.kind == "lose-replies" else fault.kind)
    stage.proxy.make(trouble, fault.target, delay_s=fault.amount / 1000)
    yield fault.seconds
    stage.proxy.make(Trouble.NONE, fault.target)


def _foreign(
    work: Callable[[Stage, Fault], dict[str, Any] | None],
) -> Callable[[Stage, Fault, dict[str, Any]], Iterator[float]]:
    """A fault made by another program; some time later an operator has fsck repair it.

    It waits for messages to damage; if none arrive, it moves to the topic or group with the most.
    """

    def make(stage: Stage, fault: Fault, touched: dict[str, Any]) -> Iterator[float]:
        done = _tried(work, stage, fault)
        for attempt in range(FINDS_TRIES):
            if done is not None:
                break
            yield FINDS_AGAIN_S
            if attempt >= FINDS_TRIES / 2 and stage.is_up:
                fault = fault._replace(target=foreign.longest(stage, fault.kind))
                touched["target"] = fault.target
            touched["since"] = now_us()
            done = _tried(work, stage, fault)
        if done is None:
            touched["skipped"] = "there was nothing to take"
            return
        touched |= done
        yield fault.seconds
        topic = fault.target.partition("/")[0]
        for _ in range(REPAIR_TRIES):  # another fault may be active: the server is down, or full
            found = yield from foreign.repair(stage, [topic])
            if found is not None:
                touched["repairing"], touched["repaired"] = found.began, found.kinds
                touched["found"] = found.words
                return

    return make


def _tried(
    work: Callable[[Stage, Fault], dict[str, Any] | None], stage: Stage, fault: Fault
) -> dict[str, Any] | None:
    """None if nothing can be done now."""
    if stage.is_up:
        with suppress(redis.RedisError, LisaError):
            return work(stage, fault)
    return None
