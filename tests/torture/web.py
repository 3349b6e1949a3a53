"""A producer and a consumer that use only the gateway's HTTP API: `python -m tests.torture.web`."""

import asyncio
import random
from typing import Any

import httpx

from tests.torture.ledger import Book, Diary, Orders, Pace, delay_ms, leaving
from tests.torture.world import ANSWERS_OF_TROUBLE, Do, Verdict, body_of, own_id, place_number

TICK_S = 0.1
PULL = {"max": 20, "wait_ms": 1_000, "group": "lisa"}
PAUSE_S = 0.2
ACK_TRIES = 5
STALE = 409


class Unanswered(Exception):
    """The gateway gave no valid answer; in the ledger it is an error like any other.

    `status`: its status code; 0 for no response.
    """

    def __init__(self, status: int = 0, said: str = "") -> None:
        super().__init__(f"{status} {said}")
        self.status = status

    def check(self) -> None:
        """Raise it, unless a failing server or client explains it."""
        if self.status not in ANSWERS_OF_TROUBLE:
            raise self


async def _post(client: httpx.AsyncClient, path: str, body: object) -> Any:
    try:
        answer = await client.post(f"/v1/topics/http/{path}", json=body)
    except httpx.HTTPError as error:
        raise Unanswered from error
    if answer.status_code >= 300:
        raise Unanswered(answer.status_code, answer.text)
    return answer.json()


async def _send(client: httpx.AsyncClient, orders: Orders) -> None:
    book, chance = Book(orders), random.Random(orders.seed)
    told, pace = leaving(), Pace(orders.rate)

    async def send(call: int, number: int, delay: int) -> None:
        body = {"body": body_of(number, Do.OK), "id": own_id(number), "delay_ms": delay}
        try:
            await _post(client, "messages", body)
        except Unanswered as error:
            book.fail(call, error)
        else:
            book.confirm(call, "a")

    while not told:
        book.clock.ask()
        calls = []
        for _ in range(pace.take()):
            [number], delay = book.numbers(1), delay_ms(chance, orders.longest_s)
            call = book.send("http", [number], [Do.OK], [f"+{delay}"])
            calls.append(send(call, number, delay))
        if calls:
            book.commit()
            await asyncio.gather(*calls)
        await asyncio.sleep(TICK_S)
    book.commit()


async def _pull(client: httpx.AsyncClient, orders: Orders) -> None:
    diary, told, place = Diary(orders), leaving(), place_number("http", "lisa")

    async def settle(message_id: str, receipt: str) -> None:
        for _ in range(ACK_TRIES):
            try:
                await _post(client, f"messages/{message_id}/ack", {"receipt": receipt})
                return
            except Unanswered as error:
                if error.status == STALE:  # its lease was lost
                    return
                error.check()
                await asyncio.sleep(PAUSE_S)

    while not told:
        try:
            deliveries = (await _post(client, "pull", PULL))["deliveries"]
        except Unanswered as error:
            error.check()
            await asyncio.sleep(PAUSE_S)
            continue
        for row in deliveries:
            handling = diary.begin(place, row["body"], row["attempt"], row["due_ms"])
            diary.note(handling, verdict=Verdict.OK)
        await asyncio.gather(*[settle(row["id"], row["receipt"]) for row in deliveries])


async def _run(orders: Orders) -> None:
    work = _pull if orders.kind == "puller" else _send
    async with httpx.AsyncClient(base_url=orders.gateway, timeout=5.0) as client:
        await work(client, orders)


if __name__ == "__main__":
    asyncio.run(_run(Orders.read()))
