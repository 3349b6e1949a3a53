"""Tests which rights of a role a server refuses, with commands that change no data."""

from __future__ import annotations

from collections.abc import Sequence

from lisa.admin.acl import ROLES, rights_of
from lisa.core.model.errors import ConfigError
from lisa.core.redis import errors
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.presence import PROBE
from lisa.core.store.store import Store
from lisa.core.transitions import loader
from lisa.core.transitions.inspect import Inspect

_NOT_PROBED = frozenset(
    {"select", "subscribe", "cluster|slots", "asking", "wait", "waitaof", "multi", "exec"}
)
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
    "xadd": ("NOMKSTREAM", "*", "f", "v"), "xlen": (), "xrange": ("-", "+", "COUNT", 1),
    "xrevrange": ("+", "-", "COUNT", 1), "xdel": ("0-1",), "xack": ("g", "0-1"),
    "xtrim": ("MAXLEN", "x"), "xpending": ("g",), "xclaim": ("g", "c", 0, "0-1"),
    "xsetid": ("x",), "xgroup|create": ("g", "0"), "xgroup|destroy": ("g",),
    "xgroup|delconsumer": ("g", "c"), "xinfo|groups": (), "xinfo|consumers": ("g",),
    "xinfo|stream": (),
}  # fmt: skip
"""Arguments after the key. With them a command creates no key, and no topic has this key."""


def probe(store: Store, right: str) -> Command | None:
    """A command that needs this right and changes nothing; None if there is none."""
    if right in _NOT_PROBED:
        return None
    key = store.keys.topic(PROBE).policy
    arguments = _BARE | {
        **{name: (key, *rest) for name, rest in _ON_A_KEY.items()},
        "msetnx": (key, "", key),  # a value is missing
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
    granted = " ".join(f"+{one}" for one in rights)
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
