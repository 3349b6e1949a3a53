"""A table to which handlers with `once_in=` write in these tests."""

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from lisa import Message
from lisa.outbox import Tables

TABLES = Tables()
SHOP = MetaData()
EFFECTS = Table(
    "effects",
    SHOP,
    Column("seq", Integer, primary_key=True),
    Column("message", String(99), nullable=False),
)


def create_tables(engine: Engine) -> None:
    """Create the inbox, and the table of effects."""
    TABLES.metadata.create_all(engine, tables=[TABLES.inbox])
    SHOP.create_all(engine)


def effects(engine: Engine) -> list[str]:
    """What handlers have committed, in order."""
    with engine.connect() as connection:
        return list(connection.scalars(select(EFFECTS.c.message).order_by(EFFECTS.c.seq)))


def effect(message: Message, session: Session) -> None:
    """A handler that writes which message it handles."""
    session.execute(insert(EFFECTS).values(message=message.id))


async def effect_async(message: Message, session: AsyncSession) -> None:
    """The same for asyncio."""
    await session.execute(insert(EFFECTS).values(message=message.id))
