"""The options of `format("lisa")`: options shared by reads and writes, and parsers of values.

Spark passes options as text, with names in lower case.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from urllib.parse import parse_qsl, urlencode

from lisa.core.model.clock import parse_duration
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.redis.address import Address
from lisa.pipeline.paths import absolute

SERVER = frozenset({"url", "prefix"})
"""The options that select the server."""

MOST = 10**12

_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")

_SPARKS = frozenset({"checkpointlocation", "queryname", "outputmode"})
"""Spark's own options, which it also passes to the data source."""


def refuse_unknown(given: Mapping[str, str], known: Collection[str], mode: str) -> None:
    """Raises ConfigError for an option that a mode (write, read, readStream) does not have."""
    for name in given:
        plain = name.lower()
        if plain in known or plain in _SPARKS:
            continue
        close = difflib.get_close_matches(plain, known, 1)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else f"the options are {', '.join(sorted(known))}"
        )
        raise ConfigError(f'format("lisa") has no option {name!r} for {mode}: {hint}')


def as_url(address: Address) -> str:
    """An address as one URL with user, password and TLS files; workers receive nothing else.

    The paths of the files are absolute, because workers may have another working directory.
    """
    parts = address.parts
    if address.password or address.username:
        parts = replace(parts, user=address.username or "", password=address.password or "")
    options = {**dict(parse_qsl(parts.query, keep_blank_values=True)), **address.options}
    files = {name: absolute(str(options[name])) for name in _FILES if options.get(name)}
    return str(replace(parts, query=urlencode(options | files)))


def wrong(name: str, value: str, what: str) -> ConfigError:
    """The error for an invalid value of an option."""
    return ConfigError(f'format("lisa"), option {name!r}: {value!r} is not {what}')


def duration(given: Mapping[str, str], name: str) -> timedelta | None:
    """The value of a duration option such as 500ms, 10s or 1d; None if not set.

    Raises ConfigError for any other text.
    """
    text = given.get(name, "")
    if not text.strip():
        return None
    try:
        return parse_duration(text)
    except InvalidMessage:
        raise wrong(name, text, "a duration with a unit, as in 30s, 2h or 1d") from None


def number(given: Mapping[str, str], name: str) -> float | None:
    """The value of an option that is a number above 0; None if not set. Raises ConfigError."""
    text = given.get(name, "")
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < MOST:
        raise wrong(name, text, "a number above 0")
    return value


def whole_number(given: Mapping[str, str], name: str) -> int | None:
    """The value of an option that is an integer above 0; None if not set. Raises ConfigError."""
    text = given.get(name, "")
    if not text.strip():
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < MOST):
        raise wrong(name, text, "a whole number above 0")
    return int(text)


def listed(text: str) -> list[str]:
    """The parts of a text with commas, without spaces around them and without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    """The value of a Boolean option. Raises ConfigError unless it is true or false."""
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise wrong(name, given[name], "true or false")
    return text == "true"


def choice(given: Mapping[str, str], name: str, allowed: Collection[str], default: str) -> str:
    """The value of an option with fixed choices. Raises ConfigError for any other text."""
    text = given.get(name, default).strip().lower()
    if text not in allowed:
        raise wrong(name, given[name], f"one of {', '.join(allowed)}")
    return text
