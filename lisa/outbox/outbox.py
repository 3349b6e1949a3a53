"""`Outbox` and `AsyncOutbox`: operations written in the application's own transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, Unpack

import msgspec
from sqlalchemy import Insert, text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from lisa.core.model.clock import parse_zone, zone_name
from lisa.core.model.envelope import new_token
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_id, check_topic
from lisa.core.model.middleware import SEND as SENDS
from lisa.core.model.middleware import BaseMiddleware, checked, methods
from lisa.core.redis.flow import Flow, adrive, drive
from lisa.core.transitions.enqueue import OnDuplicate, SendOutcome, Sent
from lisa.outbox.tables import Tables, database_ms
from lisa.producer.calls import SendCall, ThroughMiddleware, single, whole_id, with_id
from lisa.producer.plan import DueOptions, SendOptions, SendPlan, new_due, showing

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    Blocking: TypeAlias = Session | scoped_session[Any] | Connection
    Awaiting: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection

T = TypeVar("T")

SEND, CANCEL, RESCHEDULE = "s", "c", "r"
"""The operations of rows."""
OPERATIONS = {SEND: "send", CANCEL: "cancel", RESCHEDULE: "reschedule"}
"""Their names."""

CHANNEL = "lisa_outbox"
"""What an outbox with `notify` notifies, and a relay with `notify` listens to."""


class RowOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The column `options`, as JSON: those of a send, or the wall time of a reschedule."""

    ttl_ms: int | None = None
    policy: str | None = None
    mode: OnDuplicate = OnDuplicate.KEEP
    has_local: bool = False
    calendar: dict[str, Any] = {}
    tz: str | None = None


class _Insert(NamedTuple):
    """Inserts a row, in the transaction of the session or connection that is the link."""

    statement: Insert
    row: dict[str, Any]
    notifies: bool

    def run(self, link: Any) -> None:
        """Insert on a blocking session."""
        connection = link if isinstance(link, Connection) else link.connection(**self._bind)
        for statement in self._statements(connection):
            connection.execute(*statement)

    async def arun(self, link: Any) -> None:
        """Insert on an asynchronous session."""
        is_bare = isinstance(link, AsyncConnection)
        connection = link if is_bare else await link.connection(**self._bind)
        for statement in self._statements(connection):
            await connection.execute(*statement)

    @property
    def _bind(self) -> dict[str, Any]:
        """Lets a session with several databases choose that of the table."""
        return {"bind_arguments": {"clause": self.statement}}

    def _statements(self, connection: Any) -> list[tuple[Any, ...]]:
        statements: list[tuple[Any, ...]] = [(self.statement, self.row)]
        if self.notifies:
            if connection.dialect.name != "postgresql":
                raise ConfigError(f"notify needs PostgreSQL, not {connection.dialect.name}")
            statements.append((text(f"NOTIFY {CHANNEL}"),))
        return statements


class _Writing:
    """The operations, as flows whose link is the caller's session or connection."""

    _form: str

    def __init__(
        self,
        *,
        tables: Tables | None = None,
        zone: tzinfo | str | None = None,
        middleware: Iterable[BaseMiddleware] = (),
        notify: bool = False,
    ) -> None:
        self.tables = tables or Tables()
        self._insert = self.tables.outbox.insert().inline().values(created_ms=database_ms())
        self._zone = None if zone is None else parse_zone(zone)
        self._notify = notify
        self._middleware = methods(checked(middleware), SENDS, self._form, type(self).__name__)

    def _send(
        self, topic: str, body: Any, message_id: str | None, options: SendOptions
    ) -> Flow[str]:
        call = SendCall(topic, [with_id(body, message_id)], options)
        if not self._middleware:
            return (yield from self._insert_call(call))[0].id
        outcomes = yield ThroughMiddleware(self._middleware, call, self._insert_call)
        return outcomes[0].id  # type: ignore[no-any-return]

    def _insert_call(self, call: SendCall) -> Flow[Sequence[SendOutcome]]:
        topic, plan = check_topic(call.topic), SendPlan.of(call.options, self._zone)
        if plan.on_duplicate is OnDuplicate.REJECT:
            raise InvalidMessage("a relay cannot tell you of a rejected id; leave out on_duplicate")
        message = single(plan, call.messages[0])
        own = RowOptions(message.ttl_ms, message.policy, plan.on_duplicate, message.has_local)
        name = whole_id(message.id, message.key)
        yield self._row(SEND, topic, name, own, due=message.due, envelope=message.tail)
        return [SendOutcome(name, Sent.ACCEPTED)]

    def _cancel(self, topic: str, message_id: str) -> Flow[None]:
        yield self._row(CANCEL, topic, message_id, RowOptions())

    def _reschedule(self, topic: str, message_id: str, due: DueOptions) -> Flow[None]:
        at, zone, calendar = new_due(due, self._zone)
        if (told := calendar.get("at_local")) is not None:
            calendar["at_local"] = told if isinstance(told, str) else told.isoformat()
        own = RowOptions(calendar=calendar, tz=zone_name(zone) if calendar and zone else None)
        yield self._row(RESCHEDULE, topic, message_id, own, due=at or "")

    def _row(
        self, operation: str, topic: str, message_id: str, options: RowOptions, **columns: Any
    ) -> _Insert:
        topic, message_id = check_topic(topic), check_id(message_id)
        written = msgspec.json.encode(options).decode()
        row = {
            "id_hash": id_hash(topic, message_id),
            "operation": operation,
            "topic": topic,
            "message_id": message_id,
            "token": new_token(),
            "due": "",
            "options": None if written == "{}" else written,
            "envelope": None,
        }
        return _Insert(self._insert, row | columns, self._notify)


def id_hash(topic: str, message_id: str) -> int:
    """The number by which operations on one message find each other: 64 bits, with a sign."""
    digest = hashlib.blake2b(f"{topic}\0{message_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


class Outbox(_Writing):
    """Writes sends, cancels and reschedules in the caller's transaction; relays forward them.

    After the commit, a relay does each operation once; after a rollback, none was made. Operations
    on one message are done in the order in which they were made. `delay` counts from the insert, by
    the database's clock.

    tables: the names of the tables.
    zone: the zone for naive datetimes, as for `Producer`.
    middleware: objects whose `send`, or `send_async`, is called around each insert of a send.
    notify: wake relays at the commit, by NOTIFY of PostgreSQL, which serializes commits. Without
        it, an idle relay looks every 250 ms.
    session: a Session, scoped_session or Connection of SQLAlchemy.

    Topic, id, body and options are checked at the call, which raises InvalidMessage. Raises what
    the database raises.
    """

    _form = "send"

    @showing(SendOptions)
    def send(
        self,
        session: Blocking,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002  as in Producer.send
        **options: Unpack[SendOptions],
    ) -> str:
        """Send a message if the transaction commits; returns its id at once.

        The arguments are those of `Producer.send`; `on_duplicate="reject"` is not possible.
        With `debounce`, `throttle` and `latest`, the message has one of the two ids of its key, and
        the first one is returned; cancel it by its key.

        {options}
        """
        return drive(self._send(topic, body, id, options), session)

    def cancel(self, session: Blocking, topic: str, message_id: str) -> None:
        """Cancel a message if the transaction commits. The outcome is not reported."""
        drive(self._cancel(topic, message_id), session)

    @showing(DueOptions)
    def reschedule(
        self, session: Blocking, topic: str, message_id: str, **due: Unpack[DueOptions]
    ) -> None:
        """Change a due time if the transaction commits. The outcome is not reported.

        {options}
        """
        drive(self._reschedule(topic, message_id, due), session)


class AsyncOutbox(_Writing):
    """Asynchronous version of `Outbox`.

    session: an AsyncSession, async_scoped_session or AsyncConnection of SQLAlchemy.
    """

    _form = "send_async"

    @showing(SendOptions)
    async def send(
        self,
        session: Awaiting,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002  as in Producer.send
        **options: Unpack[SendOptions],
    ) -> str:
        """Send a message if the transaction commits; see `Outbox.send`.

        {options}
        """
        return await adrive(self._send(topic, body, id, options), session)

    async def cancel(self, session: Awaiting, topic: str, message_id: str) -> None:
        """Cancel a message if the transaction commits. The outcome is not reported."""
        await adrive(self._cancel(topic, message_id), session)

    @showing(DueOptions)
    async def reschedule(
        self, session: Awaiting, topic: str, message_id: str, **due: Unpack[DueOptions]
    ) -> None:
        """Change a due time if the transaction commits. The outcome is not reported.

        {options}
        """
        await adrive(self._reschedule(topic, message_id, due), session)
