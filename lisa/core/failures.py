"""What the Redis client's errors mean to Lisa: which pass by themselves, which never will."""

from __future__ import annotations

import re

from redis import exceptions as client

from lisa.core import scripts
from lisa.core.errors import ConfigError, LisaError, ServerUnavailable

__all__ = [
    "ClientError",
    "is_full",
    "is_missing_group",
    "is_missing_script",
    "is_refused",
    "passes",
    "translated",
]

ClientError = (client.RedisError, client.RedisClusterException, OSError, EOFError)
"""Everything that a connection may raise."""

_PASSING = (
    client.ConnectionError,
    client.TimeoutError,
    client.BusyLoadingError,
    client.ClusterError,  # CLUSTERDOWN, and redirected too often: a slot that moves
    client.TryAgainError,
    client.AskError,
    client.MovedError,
    client.MasterDownError,
    client.ReadOnlyError,
    client.RedisClusterException,
    OSError,
    EOFError,
)
_NEVER = (
    client.AuthenticationError,
    client.AuthorizationError,
    client.AuthenticationWrongNumberOfArgsError,
    client.NoPermissionError,
    client.OutOfMemoryError,
)
_UNKNOWN_USER = (client.AuthenticationError, client.AuthenticationWrongNumberOfArgsError)
_REFUSED = re.compile(r"NOPERM|ACL failure in script|The user executing the script can't")
"""How servers begin a refusal; 6.2 words those inside of scripts like the last one."""
_PASSING_WORDS = ("UNBLOCKED", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ",
                  "NOREPLICAS", "ERR WAIT cannot be used with replica")  # fmt: skip


def passes(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, _NEVER):
        return False
    return isinstance(error, _PASSING) or str(error).startswith(_PASSING_WORDS)


def is_full(error: BaseException | None) -> bool:
    """Whether the server refused a write for want of memory."""
    return isinstance(error, client.OutOfMemoryError) or str(error).startswith("OOM")


def is_missing_script(error: BaseException) -> bool:
    """Whether the server has forgotten its scripts (restart, SCRIPT FLUSH)."""
    return isinstance(error, client.NoScriptError) or str(error).startswith("NOSCRIPT")


def is_missing_group(error: BaseException) -> bool:
    """Whether a stream or its group is not there."""
    return "NOGROUP" in str(error) or "no such key" in str(error).lower()


def is_refused(error: BaseException) -> bool:
    """Whether the server's access control refused it, also inside of a script."""
    if isinstance(error, (client.NoPermissionError, client.AuthorizationError)):
        return True
    return _REFUSED.search(str(error)) is not None


def _lacking(said: str) -> str:
    """The right that a refusal is for, as a rule that grants it."""
    if found := re.search(r"'([a-z|_.-]+)' command", said):
        return f"the right +{found[1]}"
    if found := re.search(r"\b[0-9a-f]{40}\b", said):  # servers before Redis 7.2 say no more
        script = next((one for one in scripts.names() if scripts.load(one).sha == found[0]), "?")
        return f"a right of those that the script {script!r} needs"
    if "channel" in said:
        return "the wake channel"
    return "keys of this prefix" if "key" in said else "a right"


def translated(error: BaseException, where: str) -> LisaError:
    """Lisa's error for one that will not pass, or did not in time; `where` names the server."""
    said = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    # A server that wants a password first refuses long commands by their mere length.
    if isinstance(error, _UNKNOWN_USER) or "unauthenticated" in said:
        return ConfigError(f"{where} refused user or password: {said}")
    if is_refused(error):
        return ConfigError(
            f"{where} does not permit this: {said}; this user lacks {_lacking(said)}, and "
            "`lisa acl` prints what each role needs"
        )
    if is_full(error):
        return ServerUnavailable(
            f"{where} is out of memory and takes nothing new: raise its maxmemory, "
            "or let consumers work it off"
        )
    if isinstance(error, client.ReadOnlyError) or said.startswith("READONLY"):
        return ServerUnavailable(
            f"{where} is a read-only replica: name the primary, or use redis+sentinel://"
        )
    if passes(error):
        return ServerUnavailable(f"{where} does not answer: {said}")
    return LisaError(f"{where} answered with an error: {said}")
