"""Receipts and settlement by receipt or id."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.settings import GatewaySettings
from lisa.core.transitions.ack import Settlement
from lisa.core.transitions.declare import Declare
from lisa.gateway.context import GatewayContext
from lisa.gateway.receipts import Receipt, decode_receipt, encode_receipt
from lisa.producer import Outgoing
from tests.gateways import new_topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lisa.gateway.waiter import HandedOut

GOOD = ["lisa", "gateway-h-1-ab", "id", "1-0", "AAAAAAAA-", 5, 1, "a", None]


def written(*fields: object) -> str:
    return urlsafe_b64encode(msgspec.msgpack.encode(fields)).rstrip(b"=").decode()


@pytest.mark.parametrize("timeout", [None, 30_000])
@pytest.mark.parametrize("message_id", ["a", "ü/ +%", "x" * 256])
def test_receipts_round_trip(message_id: str, timeout: int | None) -> None:
    settlement = Settlement(message_id, "1795-7", "abcd_-12+", 1_795_000_000_000, 3, "c")
    receipt = Receipt("group-1", "gateway-host-12-ab", settlement, timeout)
    text = encode_receipt(receipt)
    assert decode_receipt(text) == receipt
    assert text.isascii()
    assert not set(text) & set("/+=?&# ")


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, "no group"),
        (0, 7),
        (1, "no name!"),
        (2, ""),
        (2, "a\nb"),
        (3, "1"),
        (3, "1-x"),
        (3, "-"),
        (3, "9" * 40 + "-1"),
        (4, "short"),
        (4, "AAAA,AAA-"),
        (4, "ÄAAAAAAA-"),
        (5, -1),
        (5, 1 << 60),
        (6, 0),
        (6, 1 << 40),
        (7, "?"),
        (7, "aa"),
        (8, -1),
        (8, "x"),
    ],
)
def test_a_damaged_receipt_is_rejected(index: int, value: object) -> None:
    assert decode_receipt(written(*GOOD)).settlement.id == "id"
    with pytest.raises(InvalidMessage, match="the receipt is not valid"):
        decode_receipt(written(*GOOD[:index], value, *GOOD[index + 1 :]))
    for text in (written(*GOOD, "more"), "\N{EURO SIGN}"):
        with pytest.raises(InvalidMessage, match=r"not valid; send it as the pull returned it$"):
            decode_receipt(text)


@given(st.text() | st.binary().map(lambda data: urlsafe_b64encode(data).decode()))
def test_other_text_is_rejected(text: str) -> None:
    with pytest.raises(InvalidMessage):
        decode_receipt(text)


@pytest.fixture
async def hub(redis_url: str) -> AsyncIterator[GatewayContext]:
    hub = GatewayContext(GatewaySettings.load(redis=redis_url))
    yield hub
    await hub.close()


async def taken(
    hub: GatewayContext, topic: str, count: int = 1, **options: object
) -> list[HandedOut]:
    """Send `count` messages and pull them."""
    await hub.store.call(Declare(topic, "lisa"))
    for number in range(count):
        await hub.sender.offer(topic, Outgoing(number, **options))  # type: ignore[arg-type]
    return await hub.broker.pull(topic, group="lisa", most=count, wait_s=5.0)


async def test_batched_settlements_have_separate_outcomes(hub: GatewayContext) -> None:
    topic = new_topic()
    found = await taken(hub, topic, 20)
    acks = [hub.settler.ack(topic, one.receipt) for one in found]
    twice = [hub.settler.ack(topic, found[0].receipt)]
    outcomes = await asyncio.gather(*acks, *twice)
    assert outcomes == ["acked"] * 20 + ["repeated"]


async def test_a_reclaimed_delivery_cannot_be_settled(hub: GatewayContext) -> None:
    topic = new_topic()
    (first,) = await taken(hub, topic)
    assert await hub.settler.release(topic, first.receipt)
    (second,) = await hub.broker.pull(topic, wait_s=5.0)
    assert (await hub.settler.retry(topic, first.receipt, reason="x")).outcome == "stale"
    assert not await hub.settler.extend(topic, first.receipt)
    assert not await hub.settler.release(topic, first.receipt)
    seen = await hub.settler.look(topic, first.message.id)
    assert [(one.state, one.entry) for one in seen.group_states] == [
        ("in_flight", second.receipt.settlement.entry)
    ]
    assert await hub.settler.ack(topic, second.receipt) == "acked"


async def test_a_receipt_is_valid_at_another_gateway(hub: GatewayContext, redis_url: str) -> None:
    topic = new_topic()
    (one,) = await taken(hub, topic)
    other = GatewayContext(GatewaySettings.load(redis=redis_url))
    try:
        receipt = decode_receipt(one.receipt_text)
        assert await other.settler.extend(topic, receipt)
        assert await other.settler.ack(topic, receipt) == "acked"
    finally:
        await other.close()


async def test_settling_by_id_settles_the_current_delivery(hub: GatewayContext) -> None:
    topic = new_topic()
    (first,) = await taken(hub, topic)
    message_id = first.message.id
    await hub.settler.release(topic, first.receipt)
    assert await hub.settler.ack_by_id(topic, message_id) is None  # ready, not in flight
    assert await hub.settler.retry_by_id(topic, message_id, reason="x") is None
    await hub.broker.pull(topic, wait_s=5.0)
    assert await hub.settler.ack_by_id(topic, message_id) == "acked"
    assert await hub.settler.ack_by_id(topic, message_id) is None
    assert await hub.settler.ack_by_id(topic, "nobody") is None


async def test_a_retry_by_id_follows_the_policy(hub: GatewayContext) -> None:
    topic = new_topic()
    (first,) = await taken(hub, topic, retry=[timedelta(hours=1)])
    retried = await hub.settler.retry_by_id(topic, first.message.id, reason="no")
    assert retried is not None
    assert retried.outcome == "retrying"
    seen = await hub.settler.look(topic, first.message.id)
    assert [(one.state, one.reason) for one in seen.group_states] == [("retry", "no")]


async def test_settling_by_id_needs_a_group_if_there_are_several(hub: GatewayContext) -> None:
    topic = new_topic()
    for group in ("one", "two"):
        await hub.store.call(Declare(topic, group))
    sent = await hub.sender.offer(topic, Outgoing("x"))
    for group in ("one", "two"):
        await hub.broker.pull(topic, group=group, wait_s=5.0)
    with pytest.raises(ConfigError, match="several groups"):
        await hub.settler.ack_by_id(topic, sent.id)
    assert await hub.settler.ack_by_id(topic, sent.id, "one") == "acked"
    assert await hub.settler.ack_by_id(topic, sent.id) == "acked"
