"""An API of orders: an order is cancelled unless it is paid in time."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from lisa.outbox import AsyncOutbox, Tables


class Base(DeclarativeBase):
    """The shop's tables."""


class Order(Base):
    """An order is new, then paid or cancelled."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


engine = create_async_engine(f"sqlite+aiosqlite:///{os.environ.get('SHOP_DATABASE', 'shop.db')}")
sessions = async_sessionmaker(engine)
outbox = AsyncOutbox(tables=Tables(metadata=Base.metadata))


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Create the tables, which a real shop does in migrations."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}")
async def place(number: int) -> dict[str, str]:
    """Place an order and start its timer, in one transaction."""
    async with sessions.begin() as session:
        order = await session.get(Order, number)
        if order is None:
            order = Order(id=number, state="new")
            session.add(order)
            body = {"order": number}
            await outbox.send(session, "orders", body, id=f"order-{number}", delay="30m")
        return {"order": order.state}


@app.post("/orders/{number}/payment")
async def pay(number: int) -> dict[str, str]:
    """Pay an order and cancel its timer, in one transaction."""
    async with sessions.begin() as session:
        order = await session.get_one(Order, number, with_for_update=True)
        if order.state == "new":
            order.state = "paid"
            await outbox.cancel(session, "orders", f"order-{number}")
        return {"order": order.state}
