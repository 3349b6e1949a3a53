"""The header `Idempotency-Key`: a repeated send gets the first response and adds nothing.

The key determines the message's id, unless the request names one, and with the request's content
the send token, by which Redis recognises the repetition. No other state is needed. The header is
that of the IETF draft `draft-ietf-httpapi-idempotency-key-header`.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from typing import Any

import msgspec

from lisa.gateway.api.operations import Call, invalid
from lisa.gateway.problems import ErrorResponse

HEADER = "idempotency-key"
LONGEST = 255


class Idempotency:
    """The ids and the send token of one request with an idempotency key.

    A key belongs to a topic and to the token that authorises the request.
    """

    def __init__(self, topic: str, client: str, key: str, content: bytes) -> None:
        self._scope = f"{topic}\0{client}\0{key}"
        self.token = self._digest(6, content)
        self._ids: set[str] = set()

    def id_of(self, index: int = 0) -> str:
        """The id of the request's message with this index, if the request does not name one."""
        return f"key-{self._digest(18, b'%d' % index)}"

    def check_once(self, message_id: str | None) -> None:
        """Refuse an id of a batch that an earlier message has. Raises ErrorResponse.

        Both have the same send token, so Redis may take the second for a repetition of the first.
        """
        if message_id in self._ids:
            raise invalid(
                f"an earlier message of this batch has the id {message_id!r}; with an "
                "Idempotency-Key, each id may occur once"
            )
        if message_id is not None:
            self._ids.add(message_id)

    def _digest(self, size: int, content: bytes) -> str:
        """`size` bytes that depend on the key and on the content, as URL-safe text."""
        digest = hashlib.sha256(self._scope.encode() + b"\0" + content).digest()
        return urlsafe_b64encode(digest[:size]).decode("ascii")


def idempotency_of(call: Call[Any, Any]) -> Idempotency | None:
    """The idempotency key of a send; None without the header. Raises ErrorResponse."""
    headers = call.request.headers.getlist(HEADER)
    if not headers:
        return None
    if len(headers) > 1:
        raise invalid("the request has several headers Idempotency-Key; send one")
    given = headers[0]
    key = given[1:-1] if len(given) > 1 and given[0] == given[-1] == '"' else given
    if not 1 <= len(key) <= LONGEST or not key.isascii() or not key.isprintable():
        raise invalid(f"Idempotency-Key must have 1 to {LONGEST} printable ASCII characters")
    return Idempotency(call.topic, call.token.name, key, msgspec.json.encode(call.body))


def key_reused(message_id: str) -> ErrorResponse:
    """The problem for a key that came with other content before."""
    return ErrorResponse(
        422,
        "idempotency-key-reused",
        "this Idempotency-Key was used for a request with other content; nothing was sent",
        id=message_id,
    )
