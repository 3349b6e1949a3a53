"""Receipts: the proof of one delivery, as text that a client keeps and brings back.

It holds all that a settlement needs, so that any gateway can settle what another one handed out.
Nothing in it is trusted: a script compares the entry, or the send token, before it acts.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

import msgspec

from lisa.core.errors import InvalidMessage
from lisa.core.keys import check_group, check_id
from lisa.core.lateness import EARLY, LETTERS
from lisa.core.transitions.ack import NO_LATENESS, Settlement

__all__ = ["Receipt", "decode_receipt", "encode_receipt"]

_LATENESS = frozenset((*LETTERS, EARLY, NO_LATENESS))


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
    """One delivery: to which group and consumer, and what settles it.

    `ack_timeout_ms` is the pull's own, None for the topic's: an extension renews the same.
    """

    group: str
    consumer: str
    settlement: Settlement
    ack_timeout_ms: int | None = None


def encode_receipt(receipt: Receipt) -> str:
    """A receipt as text, fit for a URL."""
    written = _Written(receipt.group, receipt.consumer, *receipt.settlement, receipt.ack_timeout_ms)
    return urlsafe_b64encode(_encoder.encode(written)).rstrip(b"=").decode("ascii")


def decode_receipt(text: str) -> Receipt:
    """The receipt that a text stands for. Raises InvalidMessage if it is none."""
    try:
        data = text.encode("ascii")
        one = _decoder.decode(urlsafe_b64decode(data + b"=" * (-len(data) % 4)))
        check_group(one.group)
        check_id(one.id)
        milliseconds, dash, sequence = one.entry.partition("-")
        whole = dash and milliseconds.isdigit() and sequence.isdigit() and one.entry.isascii()
        if not (whole and len(one.entry) <= 41 and len(one.fence) == 9 and one.fence.isascii()):
            raise InvalidMessage("its entry or its fence is damaged")
        if "," in one.fence or one.lateness not in _LATENESS or not 0 < one.attempt < 1 << 31:
            raise InvalidMessage("its attempt or its lateness is damaged")
        if not 0 <= one.due_ms < 1 << 53 or not 0 <= (one.ack_timeout_ms or 0) < 1 << 53:
            raise InvalidMessage("its times are damaged")
        check_group(one.consumer)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise InvalidMessage(f"this is no receipt of a delivery: {error}") from None
    settlement = Settlement(one.id, one.entry, one.fence, one.due_ms, one.attempt, one.lateness)
    return Receipt(one.group, one.consumer, settlement, one.ack_timeout_ms)
