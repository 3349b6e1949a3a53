"""Receipts: opaque text that identifies a delivery, which clients send back to settle it.

A receipt holds everything a settlement needs, so that any gateway can settle any delivery. It is
not trusted: the scripts compare its entry or fence with the message before they change anything.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

import msgspec

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_group, check_id
from lisa.core.model.lateness import EARLY, FORMER, LETTERS, former, narrowed
from lisa.core.transitions.ack import NO_LATENESS, Settlement

_LATENESS = frozenset((*LETTERS, *FORMER, EARLY, NO_LATENESS))


class _Written(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    group: str
    consumer: str
    id: str
    entry: str
    fence: str
    due_ms: int
    attempt: int
    lateness: str
    ack_timeout_ms: int | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Written)


class Receipt(NamedTuple):
    """A delivery's group, consumer and settlement.

    `ack_timeout_ms` is the pull's ack timeout, which extensions reuse; None for the topic's.
    """

    group: str
    consumer: str
    settlement: Settlement
    ack_timeout_ms: int | None = None


def encode_receipt(receipt: Receipt) -> str:
    """A receipt as URL-safe text; its form is that of 0.1.0, so gateways of both can read it."""
    one = receipt.settlement._replace(lateness=former(receipt.settlement.lateness))
    written = _Written(receipt.group, receipt.consumer, *one[:-1], receipt.ack_timeout_ms)
    return urlsafe_b64encode(_encoder.encode(written)).rstrip(b"=").decode("ascii")


def decode_receipt(text: str, now_us: int) -> Receipt:
    """Parse a receipt. Raises InvalidMessage if the text is not a valid receipt.

    Its lateness is at most the time since due. now_us: the server's time.
    """
    try:
        data = text.encode("ascii")
        one = _decoder.decode(urlsafe_b64decode(data + b"=" * (-len(data) % 4)))
        check_group(one.group)
        check_id(one.id)
        milliseconds, dash, sequence = one.entry.partition("-")
        whole = dash and milliseconds.isdigit() and sequence.isdigit() and one.entry.isascii()
        if not (whole and len(one.entry) <= 41 and len(one.fence) == 9 and one.fence.isascii()):
            raise InvalidMessage("invalid entry or fence")
        if "," in one.fence or one.lateness not in _LATENESS or not 0 < one.attempt < 1 << 31:
            raise InvalidMessage("invalid attempt or lateness")
        if not 0 <= one.due_ms < 1 << 53 or not 0 <= (one.ack_timeout_ms or 0) < 1 << 53:
            raise InvalidMessage("invalid times")
        check_group(one.consumer)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise InvalidMessage("the receipt is not valid; send it as the pull returned it") from None
    late = narrowed(one.lateness, now_us - one.due_ms * 1_000)
    settlement = Settlement(one.id, one.entry, one.fence, one.due_ms, one.attempt, *late)
    return Receipt(one.group, one.consumer, settlement, one.ack_timeout_ms)
