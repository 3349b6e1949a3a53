"""An API of orders: an order is cancelled unless it is paid in time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request

from lisa import AsyncProducer


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[dict[str, AsyncProducer]]:
    """One producer for the life of the process; concurrent requests share its calls."""
    async with AsyncProducer() as producer:
        yield {"producer": producer}


def producer_of(request: Request) -> AsyncProducer:
    """The producer, as a dependency that tests can override."""
    producer: AsyncProducer = request.state.producer
    return producer


Orders = Annotated[AsyncProducer, Depends(producer_of)]
app = FastAPI(lifespan=lifespan)


@app.post("/orders/{order}")
async def place(order: int, orders: Orders) -> dict[str, str]:
    """Place an order; a repeated request adds nothing."""
    sent = await orders.send_one("orders", {"order": order}, id=f"order-{order}", delay="30m")
    return {"timeout": sent.outcome}


@app.post("/orders/{order}/payment")
async def pay(order: int, orders: Orders) -> dict[str, str]:
    """Pay: the timeout is cancelled, or has already begun."""
    return {"timeout": await orders.cancel("orders", f"order-{order}")}
