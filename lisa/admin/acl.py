"""What each role needs of the server, and not one command more: the rights that it is given.

Commands that a script calls are checked against the user's rights as well, so a role's set is what
it sends plainly and what stands in the scripts that it runs. The latter is read out of the scripts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from lisa.core import scripts
from lisa.core.errors import ConfigError
from lisa.core.keys import Keys

__all__ = [
    "NEWER", "ROLES", "Role", "base_names", "called_by", "check_roles", "every_command", "line",
    "rights_of",
]  # fmt: skip

_CALL = re.compile(r"\bp?call\('([A-Z]+)'(?:, '([A-Z]+)')?")
_CONTAINERS = ("XGROUP", "XINFO", "SCRIPT", "CLIENT", "CLUSTER", "COMMAND", "CONFIG")

NEWER = frozenset({"msetex", "waitaof"})
"""Commands that scripts do without where the server is older: its ACL does not know them."""

_ALWAYS = ("EVALSHA", "SCRIPT|LOAD", "SELECT")
_CLUSTER = ("ASKING", "CLUSTER|INFO", "CLUSTER|SLOTS")
"""What redis-py's cluster client asks for itself, and `lisa doctor`."""
_DURABILITY = ("WAIT", "WAITAOF")
_DURABLE = ("producer", "gateway")
"""Roles whose configuration may ask for replicas."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a role runs: scripts by name, and the plain commands that it sends itself."""

    about: str
    scripts: tuple[str, ...]
    commands: tuple[str, ...]
    uses_channel: bool = True
    """Whether it uses the wake channel, itself or in a script."""


_SENDING = ("cancel", "declare", "enqueue", "inspect", "reschedule")
_SETTLING = ("ack", "declare", "extend", "forget", "open", "pull", "release", "retry")
_SCHEMA = ("GET", "SET")
_LOOKING = (
    "EXISTS",
    "GET",
    "GETRANGE",
    "HGET",
    "HGETALL",
    "HKEYS",
    "HMGET",
    "INFO",
    "XINFO|GROUPS",
    "XLEN",
    "XPENDING",
    "XRANGE",
    "XREVRANGE",
    "ZCARD",
    "ZCOUNT",
    "ZRANGE",
    "ZRANK",
    "ZSCORE",
)

ROLES = {
    "producer": Role("sends, cancels, reschedules, looks up", _SENDING, (*_SCHEMA, "ZADD")),
    "manager": Role(
        "moves what is due, takes back, sweeps; its metrics",
        ("configure", "declare", "expire", "forget", "inspect", "mend", "place", "promote",
         "prune", "purge", "reclaim", "trim", "undeclare"),
        (*_SCHEMA, "EXISTS", "HDEL", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSCAN",
         "HSET", "INFO", "PING", "SCAN", "SUBSCRIBE", "TIME", "XADD", "XDEL",
         "XINFO|CONSUMERS", "XINFO|GROUPS", "XLEN", "XPENDING", "XRANGE", "XREVRANGE", "ZADD",
         "ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZREM", "ZSCAN", "ZSCORE"),
    ),
    "consumer": Role(
        "handles messages, or pulls them",
        _SETTLING,
        (*_SCHEMA, "CLIENT|ID", "CLIENT|UNBLOCK", "HDEL", "HEXISTS", "HGETALL", "HKEYS", "HSET",
         "PUBLISH", "XREAD", "XREADGROUP", "ZADD"),
    ),
    "gateway": Role(
        "the HTTP API, the page, pushes, metrics",
        (*_SENDING, *_SETTLING, "configure", "place", "purge", "requeue", "undeclare"),
        (*_LOOKING, "HDEL", "HEXISTS", "HSCAN", "HSET", "PING", "PUBLISH", "SET", "STRLEN", "TIME",
         "XREAD", "ZADD", "ZREM", "ZSCAN"),
    ),
    "operator": Role(
        "the `lisa` command line",
        (*_SENDING, "configure", "mend", "place", "purge", "requeue", "undeclare"),
        (*_LOOKING, "COMMAND|INFO", "CONFIG|GET", "HDEL", "HEXISTS", "HLEN", "HSCAN", "PING",
         "SCAN", "SCRIPT|EXISTS", "SET", "TIME", "TYPE", "XACK", "XDEL", "ZADD", "ZREM", "ZSCAN"),
    ),
    "pipeline": Role(
        "the Spark data source and its jobs",
        ("cancel", "configure", "declare", "enqueue", "inspect", "place", "restore"),
        (*_SCHEMA, "DECRBY", "EXISTS", "HDEL", "HGET", "HGETALL", "HKEYS", "HMGET", "HSET",
         "INCRBY", "INFO", "MGET", "PEXPIRE", "STRLEN", "TIME", "XGROUP|CREATE", "XGROUP|DESTROY",
         "XINFO|GROUPS", "XINFO|STREAM", "XPENDING", "XRANGE", "XREVRANGE", "XSETID", "ZADD",
         "ZCARD", "ZCOUNT", "ZRANGE", "ZSCORE"),
    ),
    "reader": Role("looks only: get, list, topics, top, metrics", ("inspect",), _LOOKING,
                   uses_channel=False),
}  # fmt: skip
"""All roles by name."""


@cache
def called_by(script: str) -> frozenset[str]:
    """The commands that a script calls, as rights name them: `hset`, `xgroup|create`."""
    code = re.sub(r"--[^\n]*", "", scripts.load(script).source)
    return frozenset(
        f"{name}|{sub}".lower() if sub and name in _CONTAINERS else name.lower()
        for name, sub in _CALL.findall(code)
    )


def check_roles(names: Iterable[str]) -> list[str]:
    """The roles named, all where none is. Raises ConfigError."""
    wanted = list(dict.fromkeys(names)) or list(ROLES)
    for name in wanted:
        if name not in ROLES:
            raise ConfigError(f"there is no role {name!r}: use {', '.join(ROLES)}")
    return wanted


def rights_of(
    names: Iterable[str],
    *,
    newer: Iterable[str] = (),
    cluster: bool = False,
    durability: bool = False,
) -> list[str]:
    """The commands that some roles need together, sorted: `evalsha`, `xgroup|create`.

    `newer` names those of `NEWER` that the server knows.
    """
    found: set[str] = set()
    for name in check_roles(names):
        role = ROLES[name]
        found.update(*map(called_by, role.scripts))
        found.update(map(str.lower, (*_ALWAYS, *role.commands, *(_CLUSTER if cluster else ()))))
        if durability and name in _DURABLE:
            found.update(map(str.lower, _DURABILITY))
    return sorted(found - (NEWER - set(newer)))


def every_command() -> list[str]:
    """What Lisa uses at all, without subcommands, as COMMAND INFO takes it: upper case, sorted."""
    return base_names(rights_of(ROLES))


def base_names(rights: Iterable[str]) -> list[str]:
    """Commands without their subcommands, upper case, sorted."""
    return sorted({right.partition("|")[0].upper() for right in rights})


def line(
    user: str,
    names: Sequence[str],
    rights: Sequence[str],
    keys: Keys,
    *,
    password: str | None,
    style: str,
) -> str:
    """One user's rights, as a command (`setuser`) or as a line of an ACL file (`file`).

    `password` None leaves passwords, and whether the user is on, as they are (a new one is off);
    an empty one asks for none. Only its SHA-256 is printed.
    """
    if password is None:
        entry = []
    elif password:
        entry = ["on", "resetpass", f"#{hashlib.sha256(password.encode()).hexdigest()}"]
    else:
        entry = ["on", "resetpass", "nopass"]
    channel = [f"&{keys.wake}"] if any(ROLES[name].uses_channel for name in names) else []
    rules = [*entry, "resetkeys", f"~{keys.prefix}:*", "resetchannels", *channel, "-@all"]
    head = "ACL SETUSER" if style == "setuser" else "user"
    return " ".join([head, user, *rules, *(f"+{right}" for right in rights)])
