"""Who looks at the page: a signed cookie instead of a token in every request.

The cookie holds a token's name and when it ends, signed with a key that follows from the token: so
any gateway that knows the token knows the session, none has to remember it, and a token that is
taken away takes its sessions along. A form carries a second signature, of the cookie itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lisa.gateway.access import EVERYTHING, Access, Token

__all__ = ["COOKIE", "forget", "form_key", "give", "is_form_key", "issue", "read"]

COOKIE = "lisa_session"
LASTS_S = 12 * 3600
MOST_BYTES = 1024

_decoder = msgspec.json.Decoder(tuple[str, int, str])


def issue(token: Token) -> str:
    """A new session of a token, as the cookie holds it."""
    content = (token.name, int(time.time()) + LASTS_S, secrets.token_urlsafe(12))
    payload = base64.urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")
    return f"{payload}.{_sign(token, 'session', payload)}"


def read(access: Access, cookie: str | None) -> Token | None:
    """The token whose session a cookie is, or None for one that ended or was never issued."""
    if not cookie or len(cookie) > MOST_BYTES or not cookie.isascii():
        return None
    payload, _, signature = cookie.partition(".")
    try:
        padded = payload + "=" * (-len(payload) % 4)
        name, ends, _ = _decoder.decode(base64.urlsafe_b64decode(padded))
    except (binascii.Error, msgspec.DecodeError, ValueError):
        return None
    token = EVERYTHING if access.is_open else access.by_name(name)
    if token is None or ends < time.time():
        return None
    return token if hmac.compare_digest(_sign(token, "session", payload), signature) else None


def form_key(token: Token, cookie: str) -> str:
    """What a form of this session carries, and no other page can know."""
    return _sign(token, "form", cookie)


def is_form_key(token: Token, cookie: str | None, given: str) -> bool:
    """Whether a form came from this session's own page."""
    if not cookie or not given.isascii():
        return False
    return hmac.compare_digest(form_key(token, cookie), given)


def give(request: Request, response: Response, cookie: str) -> None:
    """Set the cookie: for this site only, out of any script's reach."""
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    response.set_cookie(
        COOKIE, cookie, max_age=LASTS_S, httponly=True, samesite="strict", secure=secure
    )


def forget(response: Response) -> None:
    """Take the cookie away."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


def _sign(token: Token, purpose: str, text: str) -> str:
    key = hmac.digest(token.digest, b"lisa page", hashlib.sha256)
    return hmac.new(key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()
