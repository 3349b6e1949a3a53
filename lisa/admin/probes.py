"""Which of a role's rights a server refuses, found out by trying them without changing a thing."""

from __future__ import annotations

from collections.abc import Sequence

from lisa.admin.acl import rights_of
from lisa.core import failures, scripts
from lisa.core.errors import ConfigError
from lisa.core.flow import Command, ExecuteMany, Flow
from lisa.core.store import Store
from lisa.core.transitions.inspect import Inspect

__all__ = ["check", "probe", "refused"]

_NOT_PROBED = frozenset(
    {"select", "subscribe", "command", "cluster|slots", "asking", "wait", "waitaof"}
)
"""What a connection does for itself, and fails by at once, or what would change it."""

_TOPIC = "lisa.doctor"
_BARE: dict[str, tuple[str | int, ...]] = {
    "time": (), "ping": (), "client|id": (), "client|unblock": (0,),
    "info": ("server",), "scan": (0, "COUNT", 1), "evalsha": ("0" * 40, 0),
    "script|load": ("return 1",), "command|info": ("GET",), "config|get": ("save",),
    "cluster|info": (),
}  # fmt: skip
_ON_A_KEY: dict[str, tuple[str | int, ...]] = {
    "get": (), "exists": (), "type": (), "strlen": (), "del": (), "unlink": (), "mget": (),
    "getrange": (0, 0), "setrange": (0, ""), "set": ("", "XX"),
    "incrby": ("x",), "decrby": ("x",), "pexpire": (1,),
    "hget": ("f",), "hmget": ("f",), "hgetall": (), "hkeys": (), "hlen": (), "hexists": ("f",),
    "hset": ("f", "v", "odd"), "hincrby": ("f", "x"), "hdel": ("f",), "hscan": (0,),
    "zadd": ("XX", 1, "m"), "zrem": ("m",), "zcard": (), "zcount": (0, 0), "zscore": ("m",),
    "zrank": ("m",), "zrange": (0, 0), "zrangebyscore": (0, 0), "zscan": (0,),
    "xadd": ("NOMKSTREAM", "*", "f", "v"), "xlen": (), "xrange": ("-", "+", "COUNT", 1),
    "xrevrange": ("+", "-", "COUNT", 1), "xdel": ("0-1",), "xack": ("g", "0-1"),
    "xtrim": ("MAXLEN", "x"), "xpending": ("g",), "xclaim": ("g", "c", 0, "0-1"),
    "xsetid": ("x",), "xgroup|create": ("g", "0"), "xgroup|destroy": ("g",),
    "xgroup|delconsumer": ("g", "c"), "xinfo|groups": (), "xinfo|consumers": ("g",),
    "xinfo|stream": (),
}  # fmt: skip
"""Each of them changes nothing, on a key that is not there as on one of any type."""


def probe(store: Store, right: str) -> Command | None:
    """A command that needs this right and changes nothing; None where there is none."""
    words = right.upper().split("|")
    key = store.keys.topic(_TOPIC).policy
    if right in _BARE:
        return (*words, *_BARE[right])
    if right in _ON_A_KEY:
        return (*words, key, *_ON_A_KEY[right])
    if right == "hsetnx":  # it always writes, but for a key of another type: the layout's is text
        return (*words, store.keys.schema, "f", "v")
    if right == "msetnx":
        return (*words, key, "", key)  # a value is missing
    if right == "script|exists":
        return (*words, scripts.load(Inspect.script).sha)
    if right == "publish":
        return (*words, store.keys.wake, "")
    if right == "xread":
        return (*words, "COUNT", 1, "STREAMS", key, "0")
    if right == "xreadgroup":
        return (*words, "GROUP", "g", "c", "COUNT", 1, "STREAMS", key, ">")
    if right in _NOT_PROBED:
        return None
    raise AssertionError(f"no probe for {right}")


def refused(store: Store, rights: Sequence[str]) -> Flow[list[str]]:
    """Those of the rights that the server does not grant. Raises ServerUnavailable, ConfigError."""
    try:
        yield from store.check_schema()
    except ConfigError:  # its probe needs the layout's key to be there
        rights = [right for right in rights if right != "hsetnx"]
    probes = [(right, made) for right in rights if (made := probe(store, right)) is not None]
    try:
        replies = yield ExecuteMany([made for _, made in probes])
    except failures.ClientError as error:
        raise failures.translated(error, store.where) from error
    return [
        right for (right, _), reply in zip(probes, replies, strict=True)
        if isinstance(reply, Exception) and failures.is_refused(reply)
    ]  # fmt: skip


def check(store: Store, role: str) -> Flow[None]:
    """Raise ConfigError, in one line that names them, if this role lacks rights.

    Raises ServerUnavailable, too.
    """
    lacking = yield from refused(store, rights_of([role]))
    if lacking:
        raise ConfigError(
            f"{store.where} does not permit this user {' '.join(f'+{one}' for one in lacking)} on "
            f"~{store.keys.prefix}:* and &{store.keys.wake}: `lisa acl {role}` prints what the "
            f"{role} needs"
        )
