"""The rights that each role needs on the server, and which of them a server refuses."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import Keys
from lisa.core.redis import errors
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.presence import PROBE
from lisa.core.store.store import Store
from lisa.core.transitions import loader
from lisa.core.transitions.inspect import Inspect

_CALL = re.compile(r"\bp?call\('([A-Z]+)'(?:, '([A-Z]+)')?")
_CONTAINERS = ("XGROUP", "XINFO", "SCRIPT", "CLIENT", "CLUSTER", "COMMAND", "CONFIG")

NEWER = frozenset({"msetex", "waitaof"})
"""Optional commands of newer servers. Older servers reject them in an ACL rule."""

_ALWAYS = ("EVALSHA", "SELECT")
_CLUSTER = ("ASKING", "CLUSTER|INFO", "CLUSTER|SLOTS")
"""Commands of redis-py's cluster client and of `lisa doctor`."""
_DURABILITY = ("WAIT", "WAITAOF")
_DURABLE = ("producer", "gateway", "operator", "relay")
"""Roles that heed the setting `durability`, which waits for replicas."""

_SENDING = ("cancel", "coalesce", "declare", "enqueue", "inspect", "reschedule", "schedule")
_SETTLING = ("ack", "declare", "defer", "extend", "forget", "open", "pull", "release", "retry")

_SCHEMA = ("GET", "SET")
_READING = (
    "EXISTS",
    "GET",
    "GETRANGE",
    "HGET",
    "HGETALL",
    "HKEYS",
    "HLEN",
    "HMGET",
    "INFO",
    "XINFO|GROUPS",
    "XLEN",
    "XPENDING",
    "XRANGE",
    "XREVRANGE",
    "ZCARD",
    "ZCOUNT",
    "ZLEXCOUNT",
    "ZRANGE",
    "ZRANK",
    "ZSCORE",
)

_NOT_PROBED = frozenset({"select", "subscribe", "cluster|slots", "asking", "wait", "waitaof"})
"""Commands without a probe: every connection sends them first, they change the connection, or the
role also works without them.
"""

_BARE: dict[str, tuple[str | int, ...]] = {
    "time": (),
    "ping": (),
    "client|id": (),
    "client|unblock": (0,),
    "info": ("server",),
    "scan": (0, "COUNT", 1),
    "evalsha": ("0" * 40, 0),
    "script|load": ("return 1",),
    "command|info": ("GET",),
    "cluster|info": (),
}

# A table: each command with its arguments, grouped by type.
_ON_A_KEY: dict[str, tuple[str | int, ...]] = {
    "get": (), "exists": (), "type": (), "strlen": (), "del": (), "unlink": (), "mget": (),
    "getrange": (0, 0), "setrange": (0, ""), "set": ("", "XX"),
    "incrby": ("x",), "decrby": ("x",), "pexpire": (1,), "persist": (),
    "hget": ("f",), "hmget": ("f",), "hgetall": (), "hkeys": (), "hlen": (), "hexists": ("f",),
    "hset": ("f", "v", "odd"), "hincrby": ("f", "x"), "hdel": ("f",), "hscan": (0,),
    "zadd": ("XX", 1, "m"), "zrem": ("m",), "zcard": (), "zcount": (0, 0), "zscore": ("m",),
    "zmscore": ("m",), "zrank": ("m",), "zrange": (0, 0), "zrangebyscore": (0, 0), "zscan": (0,),
    "zlexcount": ("-", "+"),
    "xadd": ("NOMKSTREAM", "*", "f", "v"), "xlen": (), "xrange": ("-", "+", "COUNT", 1),
    "xrevrange": ("+", "-", "COUNT", 1), "xdel": ("0-1",), "xack": ("g", "0-1"),
    "xtrim": ("MAXLEN", "x"), "xpending": ("g",), "xclaim": ("g", "c", 0, "0-1"),
    "xsetid": ("x",), "xgroup|create": ("g", "0"), "xgroup|destroy": ("g",),
    "xgroup|delconsumer": ("g", "c"), "xinfo|groups": (), "xinfo|consumers": ("g",),
    "xinfo|stream": (),
}  # fmt: skip
"""Arguments after the key. With them a command creates no key, and no topic has this key."""


@dataclass(frozen=True, slots=True)
class Role:
    """The scripts that a role runs, and the commands that it sends itself."""

    about: str
    scripts: tuple[str, ...]
    commands: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Further commands, for warnings only: without them the role works but does not warn."""
    uses_channel: bool = True
    """Whether the role or its scripts use the wake channel."""
    loads: bool = True
    """Whether the role may load scripts, and so let the server run any script, even an endless one.

    Without this right, a role can run the scripts that other roles have loaded.
    """
    patterns: tuple[str, ...] = ()
    """Patterns of further keys, after the prefix."""


# A table: each role with its scripts and its commands.
ROLES = {
    "producer": Role(
        "sends, cancels, reschedules, looks up",
        _SENDING,
        (*_SCHEMA, "HGET", "HGETALL", "HMGET", "HSCAN", "TIME", "ZADD", "ZRANGE"),
        optional=("INFO",),
    ),
    "manager": Role(
        "promotes, reclaims and sweeps messages; its metrics",
        ("absorb", "clear", "configure", "declare", "expire", "forget", "inspect", "mend",
         "enqueue", "cancel", "limit", "promote", "prune", "purge", "reclaim", "renew",
         "reschedule", "schedule", "set_layout", "trim", "undeclare"),
        (*_SCHEMA, "EXISTS", "HDEL", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSCAN",
         "HSET", "INFO", "PEXPIRE", "PING", "SCAN", "SUBSCRIBE", "TIME", "XADD", "XDEL",
         "XINFO|CONSUMERS", "XINFO|GROUPS", "XLEN", "XPENDING", "XRANGE", "XREVRANGE", "ZADD",
         "ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZREM", "ZSCAN", "ZSCORE"),
    ),
    "consumer": Role(
        "handles or pulls messages",
        _SETTLING,
        (*_SCHEMA, "CLIENT|ID", "CLIENT|UNBLOCK", "HDEL", "HGETALL", "HKEYS", "HSET",
         "PUBLISH", "TIME", "XREAD", "XREADGROUP", "ZADD", "ZRANGE"),
        optional=("INFO",),
    ),
    "gateway": Role(
        "the HTTP API, the page, pushes, metrics",
        (*_SENDING, *_SETTLING, "clear", "configure", "limit", "mend", "purge", "read", "recount",
         "requeue", "set_layout", "undeclare"),
        (*_READING, "DEL", "HDEL", "HSCAN", "HSET", "PING", "PUBLISH", "SET", "STRLEN",
         "XREAD", "ZADD", "ZREM", "ZSCAN"),
        patterns=("logout:[^{]*",),
    ),
    "operator": Role(
        "the `lisa` command line",
        (*_SENDING, "clear", "configure", "limit", "mend", "purge", "recount", "requeue",
         "set_layout", "undeclare"),
        (*_READING, "COMMAND|INFO", "HDEL", "HEXISTS", "HSCAN", "PING",
         "SCAN", "SCRIPT|EXISTS", "SET", "TIME", "TYPE", "XACK", "XDEL", "ZADD", "ZREM", "ZSCAN"),
    ),
    "relay": Role(
        "forwards the operations of an outbox",
        ("cancel", "coalesce", "declare", "enqueue", "inspect", "reschedule"),
        (*_SCHEMA, "HDEL", "HGET", "HGETALL", "HMGET", "HSET", "TIME", "ZADD", "ZRANGE"),
        optional=("INFO",),
    ),
    "pipeline": Role(
        "the Spark data source and its jobs",
        ("cancel", "configure", "declare", "enqueue", "inspect", "limit", "read", "reschedule",
         "restore", "set_layout"),
        (*_SCHEMA, "DECRBY", "EXISTS", "HDEL", "HGET", "HGETALL", "HKEYS", "HMGET", "HSCAN",
         "HSET", "INCRBY", "INFO", "MGET", "PEXPIRE", "STRLEN", "TIME", "XGROUP|CREATE",
         "XGROUP|DESTROY", "XDEL", "XINFO|GROUPS", "XINFO|STREAM", "XPENDING", "XRANGE",
         "XREVRANGE", "XSETID", "ZADD", "ZCARD", "ZCOUNT", "ZRANGE", "ZSCORE"),
        patterns=("pace:[^{]*",),
    ),
    "reader": Role("reads only: get, list, topics, top, metrics", ("inspect",), _READING,
                   uses_channel=False, loads=False),
}  # fmt: skip
"""All roles by name."""


@cache
def called_by(script: str) -> frozenset[str]:
    """The commands that a script calls, in ACL notation: `hset`, `xgroup|create`."""
    code = re.sub(r"--[^\n]*", "", loader.load(script, loader.features_of(script)).source)
    return frozenset(
        f"{name}|{sub}".lower() if sub and name in _CONTAINERS else name.lower()
        for name, sub in _CALL.findall(code)
    )


def check_roles(names: Iterable[str]) -> list[str]:
    """The given roles without duplicates, or all roles. Raises ConfigError for unknown roles."""
    wanted = list(dict.fromkeys(names)) or list(ROLES)
    for name in wanted:
        if name not in ROLES:
            raise ConfigError(f"unknown role {name!r}: use {', '.join(ROLES)}")
    return wanted


def rights_of(
    names: Iterable[str],
    *,
    newer: Iterable[str] = (),
    cluster: bool = False,
    durability: bool = False,
) -> list[str]:
    """The commands that the given roles need, sorted, in ACL notation: `xgroup|create`.

    newer: the commands of `NEWER` that the server supports.
    """
    found: set[str] = set()
    for name in check_roles(names):
        role = ROLES[name]
        found.update(*map(called_by, role.scripts))
        loading = ("SCRIPT|LOAD",) if role.loads else ()
        own = (*_ALWAYS, *loading, *role.commands, *role.optional, *(_CLUSTER if cluster else ()))
        found.update(map(str.lower, own))
        if durability and name in _DURABLE:
            found.update(map(str.lower, _DURABILITY))
    return sorted(found - (NEWER - set(newer)))


def every_command() -> list[str]:
    """All commands that Lisa uses, without subcommands: upper case, sorted."""
    return sorted({right.partition("|")[0].upper() for right in rights_of(ROLES)})


def line(
    user: str,
    names: Sequence[str],
    rights: Sequence[str],
    keys: Keys,
    *,
    password: str | None,
    style: str,
) -> str:
    """One user's rights as a command (style `setuser`) or a line of an ACL file (`file`).

    password: None keeps the user's passwords and on/off state (a new user is off), "" allows
        access without a password. The line contains only the password's SHA-256.
    """
    if password is None:
        entry = []
    elif password:
        entry = ["on", "resetpass", f"#{hashlib.sha256(password.encode()).hexdigest()}"]
    else:
        entry = ["on", "resetpass", "nopass"]
    channel = [f"&{keys.wake}"] if any(ROLES[name].uses_channel for name in names) else []
    further = dict.fromkeys(pattern for name in names for pattern in ROLES[name].patterns)
    patterns = [f"~{pattern}" for pattern in (*keys.patterns(), *map(keys.under, further))]
    rules = [*entry, "resetkeys", *patterns, "resetchannels", *channel, "-@all"]
    head = "ACL SETUSER" if style == "setuser" else "user"
    return " ".join([head, user, *rules, *(f"+{right}" for right in rights)])


def probe(store: Store, right: str) -> Command | None:
    """A command that needs this right and changes nothing; None if there is none."""
    if right in _NOT_PROBED:
        return None
    key = store.keys.topic(PROBE).policy
    arguments = _BARE | {
        **{name: (key, *rest) for name, rest in _ON_A_KEY.items()},
        **dict.fromkeys(("mset", "msetnx"), (key, "", key)),  # a value is missing
        "rename": (key, key),
        "script|exists": (loader.load(Inspect.script).sha,),
        "publish": (store.keys.wake, ""),
        "xread": ("COUNT", 1, "STREAMS", key, "0"),
        "xreadgroup": ("GROUP", "g", "c", "COUNT", 1, "STREAMS", key, ">"),
    }
    return (*right.upper().split("|"), *arguments[right])


def refused(store: Store, rights: Sequence[str]) -> Flow[list[str]]:
    """The rights that the server does not grant. Raises ServerUnavailable, ConfigError."""
    probes = [(right, made) for right in rights if (made := probe(store, right)) is not None]
    replies = yield from store.commands_once([made for _, made in probes])
    return [
        right
        for (right, _), reply in zip(probes, replies, strict=True)
        if isinstance(reply, Exception) and errors.is_refused(reply)
    ]


def rules(store: Store, rights: Sequence[str]) -> str:
    """Rights as an ACL has them, with the keys and the channel that they are needed on."""
    granted = " ".join(f"+{right}" for right in rights)
    return f"{granted} on the keys of the prefix {store.keys.prefix} and &{store.keys.wake}"


def check(store: Store, role: str) -> Flow[None]:
    """Check the rights that a role cannot work without.

    Raises ConfigError with the missing rights in one line, and ServerUnavailable.
    """
    optional = {name.lower() for name in ROLES[role].optional}
    needed = [right for right in rights_of([role]) if right not in optional]
    lacking = yield from refused(store, needed)
    if lacking:
        raise ConfigError(
            f"{store.where} does not permit this user {rules(store, lacking)}: `lisa acl {role}` "
            f"prints the rights of the {role}"
        )
