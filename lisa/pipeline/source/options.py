"""The options of `format("lisa")`: what all its faces share, and how one is read and refused.

Spark hands options over as text, their names in lower case.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from lisa.core.address import DEFAULT_URL, Address
from lisa.core.clock import parse_duration
from lisa.core.connection import Connection
from lisa.core.errors import ConfigError, InvalidMessage
from lisa.core.keys import DEFAULT_PREFIX, Keys
from lisa.core.options import PRODUCER_RETRY_TIME
from lisa.core.store import SyncStore

__all__ = [
    "SERVER", "as_url", "choice", "duration", "flag", "number", "open_store", "refuse_unknown",
    "server_of", "whole_number", "wrong",
]  # fmt: skip

SERVER = frozenset({"url", "prefix"})
"""The options that name the server."""

MOST = 10**12

_SPARKS = frozenset({"checkpointlocation", "queryname", "outputmode"})
"""What Spark itself is told by an option, and hands on."""


def refuse_unknown(given: Mapping[str, str], known: Collection[str], face: str) -> None:
    """Raise ConfigError for an option that a face ("write", "read") does not have."""
    for name in given:
        plain = name.lower()
        if plain in known or plain in _SPARKS:
            continue
        close = difflib.get_close_matches(plain, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
        raise ConfigError(f'format("lisa") has no option {name!r} to {face}: {hint}')


def server_of(given: Mapping[str, str]) -> tuple[str, str]:
    """URL and prefix: options `url` and `prefix`, else the environment, else the default ones.

    To be asked on the driver: workers have another environment. Raises ConfigError.
    """
    url = given.get("url") or os.environ.get("LISA_REDIS_URL") or DEFAULT_URL
    prefix = given.get("prefix") or os.environ.get("LISA_PREFIX") or DEFAULT_PREFIX
    Address(url), Keys(prefix)
    return url, prefix


def open_store(url: str, prefix: str, patience: timedelta = PRODUCER_RETRY_TIME) -> SyncStore:
    """A store on a connection of its own; the caller closes it."""
    return SyncStore(Connection(Address(url)), Keys(prefix), patience, "pipeline")


def as_url(address: Address) -> str:
    """An address as one URL, with its user, password and files: all that workers are told."""
    parts = urlsplit(address.url)
    place = parts.netloc.rpartition("@")[2]
    netloc = parts.netloc
    if address.password or address.username:
        user = quote(address.username or "", safe="")
        netloc = f"{user}:{quote(address.password or '', safe='')}@{place}"
    query = "&".join(filter(None, [parts.query, urlencode(dict(address.options))]))
    return urlunsplit((parts.scheme, netloc, parts.path, query, ""))


def wrong(name: str, value: str, what: str) -> ConfigError:
    """The error for an option's value."""
    return ConfigError(f'format("lisa"), option {name!r}: {value!r} is not {what}')


def duration(given: Mapping[str, str], name: str) -> timedelta | None:
    """An option that is a duration with its unit: 500ms, 10s, 1d. Raises ConfigError."""
    text = given.get(name)
    if text is None or not text.strip():
        return None
    try:
        return parse_duration(text)
    except InvalidMessage:
        raise wrong(name, text, "a duration with its unit, as in 30s, 2h or 1d") from None


def number(given: Mapping[str, str], name: str) -> float | None:
    """An option that is a number above 0. Raises ConfigError."""
    text = given.get(name)
    if text is None or not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < MOST:
        raise wrong(name, text, "a number above 0")
    return value


def whole_number(given: Mapping[str, str], name: str) -> int | None:
    """An option that is a whole number above 0. Raises ConfigError."""
    text = given.get(name)
    if text is None or not text.strip():
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < MOST):
        raise wrong(name, text, "a whole number above 0")
    return int(text)


def flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    """An option that is true or false. Raises ConfigError."""
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise wrong(name, given[name], "true or false")
    return text == "true"


def choice(given: Mapping[str, str], name: str, allowed: Collection[str], default: str) -> str:
    """An option that is one of some words. Raises ConfigError."""
    text = given.get(name, default).strip().lower()
    if text not in allowed:
        raise wrong(name, given[name], f"one of {', '.join(allowed)}")
    return text
