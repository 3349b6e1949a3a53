"""Sessions of the web page: a signed cookie instead of a token in each request.

The cookie holds the token's name and an expiry time, signed with a key derived from the token.
Any gateway with that token can verify the session without storing it, and removing the token ends
its sessions. A logout stores the session's id in Redis until the cookie expires. A form carries a
second signature, over the cookie.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lisa.core.store.store import AsyncStore
from lisa.gateway.access import EVERYTHING, Access, Token

COOKIE = "lisa_session"
LASTS_S = 12 * 3600
MOST_BYTES = 1024

_decoder = msgspec.json.Decoder(tuple[str, int, str])


def cookie_of(request: Request) -> str | None:
    """The value of a request's session cookie.

    Not by `http.cookies`, which takes seconds for long quoted values before Python 3.11.10.
    """
    for header in request.headers.getlist("cookie"):
        for pair in header.split(";"):
            name, _, value = pair.partition("=")
            if name.strip() == COOKIE:
                return value.strip()
    return None


def issue(token: Token, now_ms: int) -> str:
    """The cookie value for a new session of a token. now_ms: the server's time, as below."""
    content = (token.name, now_ms // 1000 + LASTS_S, secrets.token_urlsafe(12))
    payload = base64.urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")
    return f"{payload}.{_sign(token, 'session', payload)}"


class Session(NamedTuple):
    """A session from a valid cookie. `ends`: in seconds since the epoch."""

    token: Token
    ends: int
    id: str


def read(access: Access, cookie: str | None, now_ms: int) -> Session | None:
    """The session of a cookie; None if the cookie has expired or is not valid."""
    if not cookie or len(cookie) > MOST_BYTES or not cookie.isascii():
        return None
    payload, _, signature = cookie.partition(".")
    try:
        padded = payload + "=" * (-len(payload) % 4)
        name, ends, session_id = _decoder.decode(base64.urlsafe_b64decode(padded))
    except (binascii.Error, msgspec.DecodeError, ValueError):
        return None
    token = EVERYTHING if access.is_open else access.by_name(name)
    if token is None or ends * 1000 < now_ms:
        return None
    is_valid = hmac.compare_digest(_sign(token, "session", payload), signature)
    return Session(token, ends, session_id) if is_valid else None


async def end(store: AsyncStore, session: Session, now_ms: int) -> None:
    """Make a session invalid at every gateway. Raises LisaError."""
    left_ms = max(1, session.ends * 1000 - now_ms)
    await store.drive(store.command("SET", store.keys.logout(session.id), "", "PX", left_ms))


async def has_ended(store: AsyncStore, session: Session) -> bool:
    """Whether a session was ended by a logout. Raises LisaError."""
    return bool(await store.drive(store.command("EXISTS", store.keys.logout(session.id))))


def form_key(token: Token, cookie: str) -> str:
    """The anti-forgery key that every form of this session carries."""
    return _sign(token, "form", cookie)


def is_form_key(token: Token, cookie: str | None, given: str) -> bool:
    """Whether a form's key belongs to this session."""
    if not cookie or not given.isascii():
        return False
    return hmac.compare_digest(form_key(token, cookie), given)


def give(request: Request, response: Response, cookie: str) -> None:
    """Set the cookie: same-site only and not readable by scripts."""
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    response.set_cookie(
        COOKIE, cookie, max_age=LASTS_S, httponly=True, samesite="strict", secure=secure
    )


def forget(response: Response) -> None:
    """Delete the cookie."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


def _sign(token: Token, purpose: str, text: str) -> str:
    key = hmac.digest(token.digest, b"lisa page", hashlib.sha256)
    return hmac.new(key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()
