"""The audit log: who changed what through the gateway, and how much.

One record at INFO for each change by an API or the web page, except sends, pulls and settlements,
which the journal has. An operation of the API that ended with an error, and may have changed
something, has the result `failed`. In JSON logs, every part is a field of its own.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import HTTPConnection

from lisa.core.model.keys import shown_id
from lisa.gateway.access import Token, client_of
from lisa.gateway.problems import BoundedWarnings

log = logging.getLogger("lisa.gateway.audit")

_refused_logins = BoundedWarnings(log)
_refused_tokens = BoundedWarnings(log)


def changed(connection: HTTPConnection, token: Token, action: str, **details: Any) -> None:
    """Record a change: what was done to what (topic, id, session, ...), and how many times."""
    known = {name: value for name, value in details.items() if value not in (None, "")}
    parts = [action, *(f"{name}={_shown(value)!r}" for name, value in known.items())]
    fields = {"token": token.name, "client": client_of(connection), "action": action, **known}
    log.info(
        "token %r from %s: %s",
        token.name,
        fields["client"],
        " ".join(parts),
        extra={f"audit_{name}": value for name, value in fields.items()},
    )


def _shown(value: object) -> object:
    return shown_id(value) if isinstance(value, str) else value


def login_refused(connection: HTTPConnection, reason: str) -> None:
    """Record a refused login; many are summarised."""
    _refused_logins.warn("login from %s refused: %s", client_of(connection), reason)


def token_refused(connection: HTTPConnection, reason: str) -> None:
    """Record a request with a refused bearer token; many are summarised."""
    _refused_tokens.warn("bearer token from %s refused: %s", client_of(connection), reason)
