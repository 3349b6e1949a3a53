"""Classifies the Redis client's errors as temporary or permanent, and translates them."""

from __future__ import annotations

import re
from typing import NamedTuple

from redis import exceptions as client

from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable, SlotMoving
from lisa.core.transitions import loader

ClientError = (client.RedisError, client.RedisClusterException, OSError, EOFError)
"""All exceptions that a connection may raise."""
LOST = (client.ConnectionError, client.TimeoutError, OSError)
"""Those after which it is unknown whether the server has handled the command."""

_PASSING = (
    client.ConnectionError,
    client.TimeoutError,
    client.ClusterError,  # CLUSTERDOWN, or too many redirections while a slot moves
    client.RedisClusterException,
    OSError,
    EOFError,
)
_NEVER = (client.AuthenticationError, client.AuthorizationError)  # connection errors in redis-py
_UNKNOWN_USER = (client.AuthenticationError, client.AuthenticationWrongNumberOfArgsError)
_REFUSED = re.compile(r"NOPERM|ACL failure in script|The user executing the script can't")
"""How servers word a refusal; the last form is that of Redis 6.2 inside scripts."""
_LOCAL = re.compile(r"redis://(localhost|127\.0\.0\.1|\[::1\])?(:|/|$)")
_IN_SCRIPT = re.compile(r"^Error running script .*?: -(?=[A-Z]+ )")
"""How Redis 6.2 begins an error of a command in a script."""
_CUT = ("handler is closed", "transport is closed")
"""Messages of uvloop and asyncio for a connection that was closed while in use."""
_STREAMS = frozenset({"writelines", "drain", "write", "read", "feed_data", "close", "at_eof"})
_PASSING_CODES = frozenset(
    {
        "READONLY",
        "UNBLOCKED",
        "LOADING",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "BUSY",
        "NOREPLICAS",
        "MISCONF",  # it cannot write to its disk
    }
)


def _text_of(error: BaseException | None) -> str:
    """The server's words, without the script in which the error occurred."""
    return _IN_SCRIPT.sub("", str(error))


def code_of(error: BaseException | None) -> str:
    """The first word of a server's error, which redis-py removes from errors that it knows."""
    return getattr(error, "status_code", None) or _text_of(error).partition(" ")[0]


def is_moving(error: BaseException) -> bool:
    """Whether a slot moves, so that its keys are on two nodes."""
    return code_of(error) == "TRYAGAIN"


def passes(error: BaseException) -> bool:
    """Whether the error is temporary, so that the same call may succeed later."""
    if isinstance(error, _NEVER):
        return False
    if isinstance(error, _PASSING) or code_of(error) in _PASSING_CODES:
        return True
    return _text_of(error).startswith("ERR WAIT cannot be used with replica")


def is_full(error: BaseException | None) -> bool:
    """Whether the server refused a write because it is out of memory."""
    return code_of(error) == "OOM"


def is_read_only(error: BaseException | None) -> bool:
    """Whether the server refused a write because it is a read-only replica."""
    return code_of(error) == "READONLY"


def is_cut(error: BaseException) -> bool:
    """Whether an asyncio connection was closed while in use, as by another task."""
    if isinstance(error, AttributeError):
        return error.obj is None and error.name in _STREAMS
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _CUT)


def is_usable_after(error: BaseException) -> bool:
    """Whether a connection can be used again: its replies were read, and its server takes writes.

    If it has become a read-only replica, a new connection may reach the primary that replaced it.
    """
    return isinstance(error, client.ResponseError) and not is_read_only(error)


def is_shared_fault(error: BaseException) -> bool:
    """Whether an error of one connection says that the idle connections are useless as well."""
    return isinstance(error, client.ConnectionError | client.TimeoutError) or is_read_only(error)


class Refusal(NamedTuple):
    """Why a server refuses writes: the check of `lisa doctor` that it fails, cause and cure."""

    check: str
    cause: str
    cure: str


FULL = Refusal(
    "memory", "is out of memory", "raise its maxmemory, or let consumers reduce the backlog"
)
_REFUSALS = {
    "OOM": FULL,
    "MISCONF": Refusal(
        "persistence", "cannot save its data", "check the server's log and its disk"
    ),
    "NOREPLICAS": Refusal(
        "role",
        "has too few connected replicas",
        "start its replicas, or lower min-replicas-to-write",
    ),
    "READONLY": Refusal(
        "role", "is a read-only replica", "use the primary's address, or redis+sentinel://"
    ),
}


def refusal_of(reply: object) -> Refusal | None:
    """Why the server refused a write that it would take in order; None for any other reply."""
    return _REFUSALS.get(code_of(reply)) if isinstance(reply, BaseException) else None


def is_missing_script(error: BaseException) -> bool:
    """Whether the server has lost its scripts (restart, SCRIPT FLUSH)."""
    return code_of(error) == "NOSCRIPT"


def is_missing_group(error: BaseException) -> bool:
    """Whether a stream or its consumer group does not exist."""
    return "NOGROUP" in str(error) or "no such key" in str(error).lower()


def is_redirection(error: BaseException) -> bool:
    """Whether the error redirects to another node of the cluster."""
    return isinstance(error, (client.AskError, client.MovedError))


def is_refused(error: BaseException) -> bool:
    """Whether access control refused the command, directly or inside a script."""
    if isinstance(error, (client.NoPermissionError, client.AuthorizationError)):
        return True
    return _REFUSED.search(str(error)) is not None


def _lacking(reason: str) -> str:
    """The permission that a refusal is about, as an ACL rule."""
    if found := re.search(r"'([a-z|_.-]+)' command", reason):
        return f"the permission +{found[1]}"
    if found := re.search(r"\b[0-9a-f]{40}\b", reason):  # before Redis 7.2: only the script's hash
        return f"a permission that the script {loader.name_of(found[0]) or '?'!r} needs"
    if "channel" in reason:
        return "the wake channel"
    return "keys of this prefix" if "key" in reason else "a permission"


def _hint(where: str, reason: str) -> str:
    """How to start a server, if none listens on this machine."""
    if not _LOCAL.match(where) or "refused" not in reason.lower():
        return ""
    return "; `lisa up` starts a server for development"


def read_only(where: str) -> ServerUnavailable:
    """The error for a server that is a read-only replica."""
    return ServerUnavailable(_refused(where, _REFUSALS["READONLY"]))


def _refused(where: str, refusal: Refusal) -> str:
    return f"{where} {refusal.cause} and refuses writes: {refusal.cure}"


_KINDS = {
    "cluster": "is a node of a cluster: use redis+cluster://host:port",
    "sentinel": "is a Sentinel: use redis+sentinel://host:port/service",
    "standalone": "does not belong to a cluster: use redis://host:port",
    "no sentinel": "is no Sentinel: use redis://host:port, or redis+cluster:// for a cluster",
}
"""Mode of a server, as in INFO -> the cure for an address of another kind."""
_OTHER_KINDS = {
    "cluster support disabled": "standalone",
    "unknown command 'CLUSTER'": "standalone",
    "unknown command 'SENTINEL'": "no sentinel",
}
"""Words in a server's answer -> its mode."""


def wrong_kind(where: str, mode: str) -> ConfigError:
    """The error for a server whose mode is not that of its address."""
    return ConfigError(f"{where} {_KINDS[mode]}")


def translated(error: BaseException, where: str) -> LisaError:
    """Lisa's error for a permanent error, or one that outlasted patience. `where` is the server."""
    reason = _text_of(error).splitlines()[0][:300] if str(error) else type(error).__name__
    # A server that requires a password refuses long commands by their length, before login.
    if isinstance(error, _UNKNOWN_USER) or "unauthenticated" in reason:
        return ConfigError(f"{where} refused the user or password: {reason}")
    mode = next((mode for words, mode in _OTHER_KINDS.items() if words in reason), None)
    if mode or is_redirection(error):
        return wrong_kind(where, mode or "cluster")
    if is_refused(error):
        return ConfigError(
            f"{where} does not permit this: {reason}; this user lacks {_lacking(reason)}. "
            "`lisa acl` prints the permissions that each role needs"
        )
    if refusal := refusal_of(error):
        return ServerUnavailable(_refused(where, refusal))
    if code_of(error) == "LOADING":
        return ServerUnavailable(f"{where} is loading its data and does not answer until then")
    if is_moving(error):
        return SlotMoving(f"{where} is moving the topic's slot to another node: {reason}")
    if passes(error):
        return ServerUnavailable(
            f"{where} does not answer: {reason.rstrip('.')}{_hint(where, reason)}"
        )
    return LisaError(f"{where} answered with an error: {reason}")
