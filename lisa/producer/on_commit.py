"""Calls of a producer that wait until a database transaction is committed; see `on_commit`."""

# ruff: noqa: A002  `id` is the name that users expect

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta, tzinfo
from typing import Any, Unpack

from lisa.core.model.clock import checked_delay_ms
from lisa.core.model.envelope import checked_headers, decode_content, encode_head, new_token
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_id, check_topic, own_id_of, shown_id
from lisa.core.transitions.coalesce import is_rule
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.producer.calls import single, whole_id, with_id
from lisa.producer.plan import DueOptions, SendOptions, SendPlan, new_due, showing

Call = tuple[str, Callable[[], object]]
"""A call that waits: its name in errors, and what makes it."""


class OnCommit:
    """The calls of a producer that are made once a transaction is committed.

    They are made in their order, also that of calls by other objects of the same session. A
    rollback drops them; that of a savepoint drops those made since. Arguments are checked and
    bodies encoded at the call, which raises InvalidMessage; later changes of a body have no effect.
    `delay` counts from the call. `debounce`, `throttle` and `business_days` count from the commit,
    when middleware runs, too. Outcomes are not reported.

    If calls fail after the commit, the others are made nevertheless. Then `commit`, or the end of
    the block, raises the first error with a note that names the calls that failed. (In Django,
    `atomic()` raises the error at once, and the calls after it are not made.)
    """

    def __init__(
        self, producer: Any, given: Any, zone: tzinfo | None, clock: Callable[[], float]
    ) -> None:
        self._producer, self._given, self._zone, self._clock = producer, given, zone, clock

    @showing(SendOptions)
    def send(
        self, topic: str, body: Any, *, id: str | None = None, **options: Unpack[SendOptions]
    ) -> str:
        """Send one message after the commit, and return its id now. See `Producer.send`.

        A message with `debounce`, `throttle` or `latest` gets one of two ids of its key when it is
        sent. The first is returned; to cancel the message, use `cancel_key`.

        Also raises InvalidMessage for `on_duplicate="reject"`: after the commit it is too late.
        """
        plan = SendPlan.of(options, self._zone)
        if plan.on_duplicate is OnDuplicate.REJECT:
            raise InvalidMessage('on_duplicate="reject" would raise after the commit; leave it out')
        topic, message = check_topic(topic), single(plan, with_id(body, id))
        frozen, _ = decode_content(encode_head(new_token()) + message.tail)
        sent = whole_id(message.id, message.key)
        own_id = None if is_rule(message.due) else own_id_of(sent)
        options["headers"] = checked_headers(options.get("headers"))
        self._add("send", sent, topic, frozen, id=own_id, **options)
        return sent

    def cancel(self, topic: str, message_id: str) -> None:
        """Cancel a message after the commit. See `Producer.cancel`."""
        self._add("cancel", message_id, check_topic(topic), check_id(message_id))

    @showing(DueOptions)
    def reschedule(self, topic: str, message_id: str, **due: Unpack[DueOptions]) -> None:
        """Change a message's due time after the commit. See `Producer.reschedule`."""
        new_due(due, self._zone)
        self._add("reschedule", message_id, check_topic(topic), check_id(message_id), **due)

    def _add(self, name: str, message_id: str, topic: str, *rest: Any, **options: Any) -> None:
        method, delay = getattr(self._producer, name), options.get("delay")
        ends_s = 0 if delay is None else self._clock() + checked_delay_ms(delay) / 1000

        def make() -> object:
            if delay is not None:
                options["delay"] = timedelta(seconds=max(0, ends_s - self._clock()))
            return method(topic, *rest, **options)

        call = f"{name} {topic} {shown_id(message_id)}", make
        using = getattr(self._given, "using", self._given)  # that of `atomic()`
        if using is None or isinstance(using, str):
            from django.db.transaction import on_commit

            on_commit(lambda: _make([call]), using)
        else:
            _waiting(self._given).append(call)


def _make(calls: Sequence[Call]) -> None:
    """Make calls after a commit. Raises the first error once all are made."""
    errors: dict[str, BaseException] = {}
    for name, make in calls:
        try:
            if isinstance(outcome := make(), Awaitable):  # the commit runs in a greenlet
                from sqlalchemy.util import await_only

                await_only(asyncio.shield(outcome))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  the others follow
            errors.setdefault(name, error)
    for first in errors.values():
        first.add_note(f"The transaction is committed. Calls that failed: {', '.join(errors)}")
        raise first


class _Calls:
    """The calls that wait for a session, with methods for SQLAlchemy's events of the same names.

    starts: for each transaction and savepoint, how many calls there were before its first one; they
    nest, so its rollback drops all others.
    """

    def __init__(self) -> None:
        self.waiting: list[Call] = []
        self.starts: dict[Any, int] = {}
        self._is_committed = False

    def after_soft_rollback(self, _session: Any, transaction: Any) -> None:
        del self.waiting[self.starts.get(transaction, len(self.waiting)) :]

    def after_commit(self, session: Any) -> None:
        self._is_committed = not session.in_nested_transaction()

    def after_transaction_end(self, _session: Any, transaction: Any) -> None:
        """Make the calls: the connection is back in the pool, and the session can be used."""
        if transaction.parent is None:
            calls = self.waiting if self._is_committed else []
            self.waiting, self.starts, self._is_committed = [], {}, False
            _make(calls)


def _waiting(given: Any) -> list[Call]:
    """The calls that wait for a session, which begins a transaction if it has none."""
    from sqlalchemy import event
    from sqlalchemy.orm import Session

    session = given() if hasattr(given, "registry") else given  # the current one, if scoped
    if not isinstance(session, Session):
        raise TypeError(f"on_commit takes a Session, or a database of Django, not {given!r}")
    calls: _Calls | None = session.info.get(__name__)
    if calls is None:
        calls = session.info[__name__] = _Calls()
        for name in ("after_soft_rollback", "after_commit", "after_transaction_end"):
            event.listen(session, name, getattr(calls, name))
    inner: Any = session.get_nested_transaction() or session.get_transaction() or session.begin()
    while inner is not None:
        calls.starts.setdefault(inner, len(calls.waiting))
        inner = inner.parent
    return calls.waiting
