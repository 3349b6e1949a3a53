"""The inbox: `once_in=` of handlers, whose effect in a database happens once.

    @consumer.on("orders", once_in=engine)
    def handle(message, session): ...

Each delivery inserts a row for its message into the handler's own transaction. A delivery that
finds the row, because an earlier one has committed it, is acked without a call. Before the commit
it reads its row again: handlers may roll back or catch the error of a database that did.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, delete, event, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from lisa.core.model.callables import function_name
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message
from lisa.outbox.inbox_rows import (
    KEEP,
    PORTION,
    ROLLED_BACK,
    InboxRow,
    InboxRows,
    log_handled,
    log_not_deleted,
    now_ms,
)
from lisa.outbox.tables import Tables

InboxDatabase = Engine | AsyncEngine | sessionmaker[Any] | async_sessionmaker[Any]


class Inbox:
    """A table of handled deliveries, in the database to which handlers write.

    database: an `Engine` or a `sessionmaker`; for `async def` handlers an `AsyncEngine` or an
        `async_sessionmaker`.
    tables: the table's name and schema. The table must exist.
    keep: how long rows are kept; must be longer than a message that was handled may come again.

    Raises ConfigError for other objects, and for an invalid `keep`.
    """

    def __init__(
        self, database: InboxDatabase, *, tables: Tables | None = None, keep: timedelta | str = KEEP
    ) -> None:
        if isinstance(database, AsyncEngine):
            database = async_sessionmaker(database)
        elif isinstance(database, Engine):
            database = sessionmaker(database)
        elif not isinstance(database, (sessionmaker, async_sessionmaker)):
            raise ConfigError(
                f"once_in={database!r} must be an Engine, a sessionmaker, an AsyncEngine, an "
                "async_sessionmaker or an Inbox of one of these"
            )
        self._sessions: Any = database
        self._is_async = issubclass(database.class_, AsyncSession)
        self._table = (tables or Tables()).inbox
        self._rows = InboxRows(keep)
        self._is_checked = False

    def around(
        self,
        handler: Callable[..., Any],
        *,
        is_async: bool,
        is_success: Callable[[object], bool],
    ) -> Callable[[Message], Any]:
        """A function that calls a handler with a message and a session, once for each send.

        is_async: whether the handler is `async def`, as the result then is.
        is_success: whether a value that the handler returned counts as success; may raise.

        Raises ConfigError if the database needs the other kind of handler.
        """
        name = function_name(handler)
        if is_async != self._is_async:
            kind, needed = ("`async def`", "an AsyncEngine or an async_sessionmaker")
            if not is_async:
                kind, needed = ("not `async def`", "an Engine or a sessionmaker")
            raise ConfigError(f"the handler {name} is {kind}, so once_in= must be {needed}")

        def handle(message: Message) -> Any:
            with self._sessions() as session:
                row = self._begin(session, message)
                if row is None:
                    return None
                result = handler(message, session)
                self._end(session, row, is_success=is_success(result))
                self._delete_expired(session)
            return result

        async def handle_async(message: Message) -> Any:
            async with self._sessions() as session:
                row = await session.run_sync(self._begin, message)
                if row is None:
                    return None
                result = await handler(message, session)
                await session.run_sync(self._end, row, is_success=is_success(result))
                await session.run_sync(self._delete_expired)
            return result

        return handle_async if is_async else handle

    def _begin(self, session: Session, message: Message) -> InboxRow | None:
        """Begin the handler's transaction with the row; None if it was committed before."""
        if not self._is_checked:
            self._check_rolls_back(session)
        row = self._rows.row_of(message)
        session.begin()
        try:
            # If another transaction has inserted the row, this waits until that one ends.
            session.execute(insert(self._table).values(row._asdict()))
        except IntegrityError:
            session.rollback()
            if not self._has(session, row):
                raise
            log_handled(message)
            return None
        event.listen(session, "before_commit", _refuse_commit)
        return row

    def _end(self, session: Session, row: InboxRow, *, is_success: bool) -> None:
        """End the handler's transaction."""
        event.remove(session, "before_commit", _refuse_commit)
        if not is_success:
            session.rollback()
            return
        # Another delivery of the message may have inserted its row since, which expires later.
        own = select(self._table).filter_by(**row._asdict()).with_for_update()
        try:
            session.execute(own).one()
        except SQLAlchemyError as error:
            raise ConfigError(f"{ROLLED_BACK}session.begin_nested()") from error
        try:
            session.commit()
        except BaseException:
            session.invalidate()  # SQLite's connection would return with its transaction open
            raise

    def _has(self, session: Session, row: InboxRow) -> bool:
        column = self._table.c.digest
        with session.begin():
            return session.scalar(select(column).where(column == row.digest)) is not None

    def _check_rolls_back(self, session: Session) -> None:
        """Raise ConfigError if a failed handler would leave its row, and never be called again."""
        row = InboxRow(os.urandom(16), 0)
        session.begin()
        session.execute(insert(self._table).values(row._asdict()))
        session.rollback()
        if self._has(session, row):
            raise ConfigError(
                f"the table {self._table.name} keeps rows that were rolled back; its engine must "
                "not use AUTOCOMMIT, and its storage must be transactional"
            )
        self._is_checked = True

    def _delete_expired(self, session: Session) -> None:
        """Delete a portion of the expired rows, if it is time."""
        if not self._rows.begin_deleting():
            return
        digest, expires_ms = self._table.c.digest, self._table.c.expires_ms
        expired = select(digest).where(expires_ms <= now_ms()).limit(PORTION)
        try:
            with session.begin():
                # By digests: a range would, in MariaDB, wait for rows of running handlers.
                digests = session.scalars(expired).all()
                session.execute(delete(self._table).where(digest.in_(digests)))
        except Exception as error:  # noqa: BLE001  the handler's result stands, whatever it is
            log_not_deleted(error)
        else:
            self._rows.deleted(len(digests))


def _refuse_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        raise ConfigError(
            "a handler with once_in= must not commit: its session is committed when it returns"
        )
