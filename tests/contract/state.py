"""A topic's whole state as plain values: put it in, read it back, compare.

`topic(...)` names a state in the words of the design; `put` writes it with plain commands and
`read` reads the entire key space in the same form, so a test says "from this state, this call,
that state" and notices anything left over.

- a body is `"A-text"`: the send token's letter (eight times), the mark, and the text; `body="ab"`
  names the ids of bodies that are all `"A-"`;
- a tombstone is `("A-", state, due or None, attempts, instant)`;
- a row of a ready stream is `(id, due, attempt, holder)`, holder None while unread; that of a
  suspect also has its number;
- an event of the journal is `(id, state, group, attempt, {further field: value})`, in order;
  `read` checks that their numbers have no gaps;
- a reason `"no *2"` is that of a message that was deferred twice since its last failure; when its
  first attempt was due is not compared here;
- `keyed` maps a key to its own ids, each followed by a unit separator, and the whole id of a
  debounced message to the instant of its burst's first send;
- `entries` maps an id to the number of its row, None if the stream has no such entry.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lisa.core.model.envelope import decode_envelope, encode_envelope
from lisa.core.model.keys import GROUP_KEYS, LANE_KEYS, TopicKeys
from lisa.core.store.store import SyncStore

FAR = 4_000_000_000_000
LONG = 60_000
State = dict[str, Any]
FOREIGN = "(acknowledged by a foreign hand)"


class Row(NamedTuple):
    """One stream entry. `holder` has it in flight, for `idle_ms` already (written, not read).

    suspect: None for no suspect. begun: whether its holder told that its handler began (written).
    """

    id: str
    due: Any
    attempt: int = 1
    holder: str | None = None
    idle_ms: int = 0
    suspect: int | None = None
    begun: bool = False

    @property
    def state(self) -> tuple[Any, ...]:
        return self[:4] if self.suspect is None else (*self[:4], self.suspect)


@dataclass(frozen=True)
class G:
    """One group's state. `entries` None: the index has every row's id."""

    ready: Sequence[Row] = ()
    retry: Mapping[str, Any] = field(default_factory=dict)
    garbage: Mapping[str, Any] = field(default_factory=dict)
    attempts: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    leases: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, int | None] | None = None


ZSETS = ("waiting", "expiry", "ticks", "throttled")
HASHES = ("policy", "options", "stats", "consumers", "schedules", "keyed")
PARTS = {*ZSETS, *HASHES, "body", "done", "events"}


def topic(*, declared: Sequence[str] | None = None, **parts: Any) -> State:
    """A state; parts that are empty or None do not exist.

    Declares every given group, unless `declared` names the declared ones.
    """
    groups = {name: part for name, part in parts.items() if isinstance(part, G)}
    state: State = {name: part for name, part in parts.items() if part and name not in groups}
    assert state.keys() <= PARTS, f"no parts of a state: {state.keys() - PARTS}"
    if not isinstance(state.get("body", {}), Mapping):
        state["body"] = dict.fromkeys(state["body"], "A-")
    if groups if declared is None else declared:
        state["groups"] = sorted(groups if declared is None else declared)
    for name, group in groups.items():
        entries = group.entries
        if entries is None:
            entries = {row.id: number for number, row in enumerate(group.ready)}
        state[f"{name}:ready"] = [row.state for row in group.ready]
        state[f"{name}:idle"] = [(row.idle_ms, row.begun) for row in group.ready]
        for kind in GROUP_KEYS[1:]:
            value = entries if kind == "entries" else getattr(group, kind)
            if value:
                state[f"{name}:{kind}"] = dict(value)
    return state


def expected(**parts: Any) -> State:
    """A state to compare with the result of `read`; ignores idle times."""
    return {k: v for k, v in topic(**parts).items() if not k.endswith(":idle")}


def envelope(short: str) -> bytes:
    """The envelope for `"A-text"`."""
    data = encode_envelope(short[0] * 8, short[2:])
    return data[:9] + short[1].encode() + data[10:]


def put(store: SyncStore, name: str, state: State) -> None:
    """Write a state with plain commands."""
    keys = store.keys.topic(name)
    for kind in ZSETS:
        _zset(store, getattr(keys, kind), state.get(kind, {}))
    for kind in HASHES:
        _hash(store, getattr(keys, kind), state.get(kind, {}))
    _hash(store, keys.groups, dict.fromkeys(state.get("groups", ()), 1))
    for message_id, short in state.get("body", {}).items():
        store.ask("SET", keys.body(message_id), envelope(short))
    for message_id, (guard, final, due, attempts, at) in state.get("done", {}).items():
        stone = f"{guard[0] * 8}{guard[1]}{final},{'' if due is None else due},{attempts},{at}"
        store.ask("SET", keys.done(message_id), stone, "PX", 60_000)
    for group in {key.partition(":")[0] for key in state if ":" in key}:
        _put_group(store, keys, group, state)


def _put_group(store: SyncStore, keys: TopicKeys, group: str, state: State) -> None:
    its = keys.group(group)
    store.ask("XGROUP", "CREATE", its.ready, group, "0", "MKSTREAM")
    made: list[bytes] = []
    rows = zip(state[f"{group}:ready"], state[f"{group}:idle"], strict=True)
    for (message_id, due, attempt, holder, *suspect), (idle_ms, begun) in rows:
        more = [*(("attempt", attempt) if attempt > 1 else ())]
        more += ["suspect", *suspect] if suspect else []
        entry = store.ask("XADD", its.ready, "*", "id", message_id, "due", due, *more)
        made.append(entry)
        if holder is not None:
            store.ask("XREADGROUP", "GROUP", group, holder, "COUNT", 1, "STREAMS", its.ready, ">")
            if idle_ms or begun:
                idle = ("IDLE", idle_ms, "RETRYCOUNT", 1 + begun, "JUSTID")
                store.ask("XCLAIM", its.ready, group, holder, 0, entry, *idle)
            if holder == FOREIGN:
                store.ask("XACK", its.ready, group, entry)
    index = state.get(f"{group}:entries", {})
    _hash(store, its.entries, {i: b"1-1" if n is None else made[n] for i, n in index.items()})
    for kind in ("retry", "garbage", "leases"):
        _zset(store, getattr(its, kind), state.get(f"{group}:{kind}", {}))
    _hash(store, its.attempts, state.get(f"{group}:attempts", {}))
    noted = state.get(f"{group}:reasons", {}).items()
    _hash(store, its.reasons, {m: re.sub(r" \*(\d+)$", "\0\0\\1 1-1", why) for m, why in noted})


def _zset(store: SyncStore, key: str, scores: Mapping[str, int]) -> None:
    for member, score in scores.items():
        store.ask("ZADD", key, score, member)


def _hash(store: SyncStore, key: str, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        store.ask("HSET", key, name, value)


def read(store: SyncStore, name: str) -> State:
    """The whole key space in the form of `expected`; keys outside the topic by name."""
    keys = store.keys.topic(name)
    state: State = {}
    names = [one.decode() for one in store.ask("KEYS", "*")]
    # test_every_script checks the records of calls, by repeating calls.
    for key in sorted(one for one in names if not one.startswith(keys.reply(""))):
        rest = key.removeprefix(keys.root)
        ends = store.ask("PTTL", key)
        if rest.startswith("done:"):
            assert 0 < ends <= 60_000, f"{key} is kept for {ends} ms"
            state.setdefault("done", {})[rest[5:]] = _tombstone(store.ask("GET", key).decode())
            continue
        _check_expiry(store, key, rest, ends)
        if rest.startswith("body:"):
            state.setdefault("body", {})[rest[5:]] = _short(store.ask("GET", key))
        elif (group := keys.group_of(key)) is not None:
            kind = rest.rpartition(":")[2]
            state[f"{group}:{kind}"] = _of_group(store, keys, group, kind)
        elif rest in ZSETS:
            state[rest] = _scores(store, key)
        elif rest in HASHES:
            state[rest] = _fields(store, key, rest)
        elif rest == "events":
            state[rest] = _events(store.ask("XRANGE", key, "-", "+"))
        elif rest == "groups":
            state[rest] = sorted(field.decode() for field in store.ask("HKEYS", key))
        else:
            state[key] = "a key that no state names"
    return state


def _check_expiry(store: SyncStore, key: str, rest: str, ends: int) -> None:
    if rest == "throttled" and ends != -1:
        last = max(_scores(store, key).values())
        assert last - _clock(store) <= ends, f"{key} vanishes before its last instant"
    else:
        assert ends == -1, f"{key} would vanish by itself in {ends} ms"


def _fields(store: SyncStore, key: str, rest: str) -> dict[str, Any]:
    """The fields of a hash; those that are counts or instants as numbers."""
    found = {k.decode(): v.decode() for k, v in _pairs(store.ask("HGETALL", key))}
    return {k: int(v) if _is_number(rest, k) else v for k, v in found.items()}


def _is_number(rest: str, name: str) -> bool:
    is_instant = rest == "keyed" and re.search("\x1f~[12]$", name) is not None
    return rest == "stats" or is_instant or name.startswith("removing:")


def _clock(store: SyncStore) -> int:
    seconds, micros = store.ask("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def _of_group(store: SyncStore, keys: TopicKeys, group: str, kind: str) -> Any:
    if kind in LANE_KEYS:
        key = getattr(keys.lanes(group), kind)
        return _scores(store, key) if kind in LANE_KEYS[2:] else _fields(store, key, kind)
    its = keys.group(group)
    if kind in ("retry", "garbage", "leases"):
        return _scores(store, getattr(its, kind))
    pairs = [] if kind == "ready" else _pairs(store.ask("HGETALL", getattr(its, kind)))
    if kind == "attempts":
        return {name.decode(): int(value) for name, value in pairs}
    if kind == "reasons":
        noted = {name.decode(): value.decode() for name, value in pairs}
        noted = {
            m: re.sub(r"\0\0(\d+) (\d+-\d+)? -?\d*$", r" *\1", why) for m, why in noted.items()
        }
        return {m: why.removesuffix(" *0") for m, why in noted.items()}
    entries = store.ask("XRANGE", its.ready, "-", "+")
    if kind == "entries":
        number = {entry: i for i, (entry, _) in enumerate(entries)}
        return {name.decode(): number.get(entry) for name, entry in pairs}
    return _rows(store, its.ready, group, entries)


def _rows(store: SyncStore, ready: str, group: str, entries: Sequence[Any]) -> list[Any]:
    infos = [dict(_pairs(info)) for info in store.ask("XINFO", "GROUPS", ready)]
    read_up_to = {info[b"name"].decode(): info[b"last-delivered-id"] for info in infos}.get(group)
    if read_up_to is None:
        return ["the stream has no such group"]
    pending = {one[0]: one for one in store.ask("XPENDING", ready, group, "-", "+", 1000)}
    rows: list[Any] = []
    for entry, flat in entries:
        fields = dict(_pairs(flat))
        held = pending.pop(entry, None)
        holder = held[1].decode() if held else None
        if held is None and _order(entry) <= _order(read_up_to):
            holder = FOREIGN
        row = (fields[b"id"].decode(), int(fields[b"due"]), int(fields.get(b"attempt", 1)), holder)
        suspect = (int(fields[b"suspect"]),) if b"suspect" in fields else ()
        rows.append(row + suspect)
    return rows + [f"pending without an entry: {one[1].decode()}" for one in pending.values()]


def _order(entry: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in entry.split(b"-"))


def _pairs(flat: Any) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _scores(store: SyncStore, key: str) -> dict[str, int]:
    rows = _pairs(store.ask("ZRANGE", key, 0, -1, "WITHSCORES"))
    return {member.decode(): int(float(score)) for member, score in rows}


NUMBERS = {"due", "expires", "late", "end"}


def _events(entries: Sequence[Any]) -> list[tuple[Any, ...]]:
    found = []
    for number, (_, flat) in enumerate(entries, 1):
        fields = {name.decode(): value for name, value in _pairs(flat)}
        assert int(fields.pop("n")) == number
        assert re.fullmatch(rb"lisa@[^@]+:\d+", fields.pop("actor"))
        head = [fields.pop(name).decode() for name in ("id", "state", "group", "attempt")]
        more: dict[str, Any] = {}
        for name, value in fields.items():
            more[name] = _short(value) if name == "envelope" else value.decode()
            if name in NUMBERS:
                more[name] = int(value)
        found.append((*head[:3], int(head[3]), more))
    return found


def _short(data: bytes) -> str:
    found = decode_envelope(data)
    return f"{found.token[0]}{found.mark}{found.body.decode()}"


def _tombstone(stone: str) -> tuple[Any, ...]:
    final, due, attempts, at = stone[9:].split(",")
    return (stone[0] + stone[8], final, int(due) if due else None, int(attempts), int(at))
