"""Checks the options of one call and converts them to the form that the scripts read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, time, timedelta, tzinfo
from inspect import Parameter, cleandoc, signature
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import msgspec

from lisa.core.model.clock import (
    check_due_ms,
    checked_delay_ms,
    checked_ttl_ms,
    datetime_ms,
    parse_zone,
)
from lisa.core.model.envelope import checked_headers, encode_headers
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import LOCAL_HEADER, WINDOW_HEADER, check_key
from lisa.core.model.lanes import own_lane
from lisa.core.model.late import LatePolicy, message_policy, own_late
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.transitions.enqueue import OnDuplicate

RetryDelays = RetryPolicy | Sequence[timedelta | str] | str
"""A policy, a list of delays, or text: `"0,0,2m"`. Empty means no retries."""

Late = LatePolicy | Mapping[str, timedelta | str] | str
"""A policy, `{"after": "10m", "then": "skip"}`, or text: `"skip after 10m"`."""

F = TypeVar("F", bound=Callable[..., Any])

_MODES: dict[str, OnDuplicate] = {mode.value: mode for mode in OnDuplicate}
NOW = "+0"


class DueOptions(TypedDict, total=False):
    """When a message is due: at most one of `delay`, `at`, `at_ms` and `at_local`; by default now.

    delay: counted from the server's clock, so the client's clock does not matter.
    at: an aware datetime, or a naive one in `tz` or else the producer's zone. A time in the past is
        due now; more than ten years ago is refused as a mistake.
    at_ms: epoch milliseconds, UTC.
    at_local: a wall time in `tz`, as in "2026-12-24T09:00": the message is due when that clock
        shows it, also if the zone's rules change until then. A time that a change of the clock
        skips is due at the end of the gap.
    tz: the time zone of local times, and of a `window` that names none.
    fold: of a local time that occurs twice, 0 selects the first and 1 the second.
    business_days: with at_local "10:00": at that time on the n-th business day after today; 0 is
        today or the next one. The days on which `window` opens, else Monday to Friday.
    """

    delay: timedelta | str | None
    at: datetime | None
    at_ms: int | None
    at_local: datetime | time | str | None
    tz: tzinfo | str | None
    fold: int | None
    business_days: int | None


class SendOptions(DueOptions, total=False):
    """The options of a send; those of a `send_many` apply to all its messages.

    The fields of HTTP and gRPC requests, and the options of `lisa send`, are these.

    key: what the message concerns, such as an order: 1 to 256 bytes. All messages of a key can be
        listed, cancelled and rescheduled together, and ids have to be unique only within their key.
    window: when the message may be handed over, as in "mon-fri 9-17"; outside it, the message moves
        to the next opening. It takes precedence over the topic's window.
    ttl: how long after its due time the message is still worth handling.
    headers: at most 65,535 bytes, as JSON.
    retry: the message's own pauses between attempts: a list of durations, or text such as "0,0,2m".
        An empty list means a single attempt.
    late: what to do if a manager promotes the message too late, as after an outage:
        `{"after": "10m", "then": "skip"}` or "skip after 10m"; also "garbage", or "run". By default
        the topic's option.
    cost: how many messages it counts as where a rate or `fair` applies: 1 to 1,000, by default 1.
    slack: how much later than due the message may start without harm. Where messages have to wait,
        those with the earliest due time plus slack come first. By default the topic's option.
    on_duplicate: if the id is known, "keep" the earlier message (the default), "keep_live" (keep it
        only if it has not ended), "replace" it, "update" it (replace all but its due time), or
        "reject" the new one.
    """

    key: str | None
    window: str | None
    ttl: timedelta | str | None
    headers: Mapping[str, str] | None
    retry: RetryDelays | None
    late: Late | None
    cost: int | None
    slack: timedelta | str | None
    on_duplicate: OnDuplicate | str


def option_texts(options: type[Any]) -> dict[str, str]:
    """The description of each option, with its line breaks, from the docstrings above."""
    entry = re.compile(r"^(\w+): (.+(?:\n {4}.+)*)", re.MULTILINE)
    written = "\n".join(cleandoc(kind.__doc__ or "") for kind in (DueOptions, SendOptions))
    known = options.__annotations__
    return {name: text for name, text in entry.findall(written) if name in known}


def showing(options: type[Any]) -> Callable[[F], F]:
    """Let `help()` and documentation list a method's options, in the place of `{options}`."""

    def decorate(method: F) -> F:
        shown = signature(method)
        parameters = list(shown.parameters.values())[:-1]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
            for name, kind in options.__annotations__.items()
        ]
        method.__dict__["__signature__"] = shown.replace(parameters=parameters)
        texts = "\n".join(f"{name}: {text}" for name, text in option_texts(options).items())
        method.__doc__ = cleandoc(method.__doc__ or "").replace("{options}", texts)
        return method

    return decorate


def check_options(given: Mapping[str, object], options: type[Any]) -> None:
    """Raises TypeError for an unknown option."""
    known = options.__annotations__.keys()
    if not given.keys() <= known:
        unknown = min(given.keys() - known)
        what = "send" if options is SendOptions else "reschedule"
        raise TypeError(
            f"a {what} got an unexpected keyword argument {unknown!r}; its options are "
            f"{', '.join(sorted(known))}"
        )


_POLICIES = ("retry", "late", "cost", "slack")
_DUES = ("delay", "at", "at_ms", "at_local")
_DIFFERENCES = SendOptions.__annotations__.keys() - {"on_duplicate"}
"""The options that `Outgoing` has, too."""


class _Body(msgspec.Struct, frozen=True):
    body: Any


class Outgoing(_Body, frozen=True, kw_only=True):
    """One message of a `send_many` with its own options; see `Producer.send`.

    A field that is None takes the call's value. `retry=[]` means no retries, `headers={}` no
    headers. The fields are those of `SendOptions`, except `on_duplicate`.
    """

    id: str | None = None
    key: str | None = None
    delay: timedelta | str | None = None
    at: datetime | None = None
    at_ms: int | None = None
    ttl: timedelta | str | None = None
    retry: RetryDelays | None = None
    late: Late | None = None
    cost: int | None = None
    slack: timedelta | str | None = None
    headers: Mapping[str, str] | None = None
    at_local: datetime | time | str | None = None
    tz: tzinfo | str | None = None
    fold: int | None = None
    business_days: int | None = None
    window: str | None = None

    @property
    def is_by_calendar(self) -> bool:
        """Whether the message names a wall time, a window or a zone of its own."""
        return (
            self.at_local is not None
            or self.window is not None
            or self.business_days is not None
            or self.tz is not None
            or self.fold is not None
            or (self.headers is not None and _are_by_calendar(self.headers))
        )


class SendPlan(NamedTuple):
    """The options of a call, or of one of its messages, in the form that the script reads."""

    due: str = NOW
    ttl_ms: int | None = None
    policy: str | None = None
    headers: bytes = b"0000"
    on_duplicate: OnDuplicate = OnDuplicate.KEEP
    zone: tzinfo | None = None
    options: SendOptions | None = None
    """The options as they were given."""
    is_by_calendar: bool = False
    """Whether a wall time or a window is among them."""
    key: str | None = None

    @classmethod
    def of(cls, options: SendOptions, zone: tzinfo | None) -> SendPlan:
        """Check a call's options. Raises InvalidMessage, or TypeError for an unknown option.

        zone: the producer's default zone.
        """
        check_options(options, SendOptions)
        tz = options.get("tz")
        zone = parse_zone(tz) if tz is not None else zone
        due = due_text(options.get("delay"), options.get("at"), options.get("at_ms"), zone)
        headers, ttl = options.get("headers"), options.get("ttl")
        key = options.get("key")
        is_by_calendar = not (
            options.get("at_local") is None
            and options.get("window") is None
            and options.get("business_days") is None
            and options.get("fold") is None
            and (headers is None or not _are_by_calendar(headers))
        )
        if is_by_calendar:
            due, headers = _placed(options, due, zone)
        return cls(
            due or NOW,
            None if ttl is None else checked_ttl_ms(ttl),
            _policy(*map(options.get, _POLICIES)),
            encode_headers(headers),
            _on_duplicate(options.get("on_duplicate", OnDuplicate.KEEP)),
            zone,
            options,
            is_by_calendar,
            None if key is None else check_key(key),
        )

    def with_differences(self, message: Outgoing) -> SendPlan:
        """The plan of one message that overrides the call's options. Raises InvalidMessage."""
        if self.is_by_calendar or message.is_by_calendar:
            return self._by_calendar(message)
        # `_replace` is slower, which matters for ten million messages.
        return SendPlan(
            due_text(message.delay, message.at, message.at_ms, self.zone) or self.due,
            self.ttl_ms if message.ttl is None else checked_ttl_ms(message.ttl),
            self._policy_of(message),
            self.headers if message.headers is None else encode_headers(message.headers),
            self.on_duplicate,
            self.zone,
            self.options,
            key=self.key if message.key is None else check_key(message.key),
        )

    def _policy_of(self, message: Outgoing) -> str | None:
        own = (message.retry, message.late, message.cost, message.slack)
        if own == (None, None, None, None):
            return self.policy
        given = map((self.options or {}).get, _POLICIES)
        return _policy(*(b if a is None else a for a, b in zip(own, given, strict=True)))

    def _by_calendar(self, message: Outgoing) -> SendPlan:
        """The plan of one message if a wall time or a window is involved. Raises InvalidMessage."""
        options: dict[str, Any] = {**(self.options or {})}
        own = {name: getattr(message, name) for name in _DIFFERENCES}
        if any(own[name] is not None for name in _DUES):
            for name in (*_DUES, "fold", "business_days"):
                options.pop(name, None)
        options.update({name: value for name, value in own.items() if value is not None})
        return SendPlan.of(cast(SendOptions, options), self.zone)


def _are_by_calendar(headers: object) -> bool:
    """Whether headers name a window or a wall time; they may be those of another message."""
    if not isinstance(headers, (dict, Mapping)):  # the check of a dict is fast
        return False
    return WINDOW_HEADER in headers or LOCAL_HEADER in headers


def _placed(
    options: SendOptions, due: str | None, zone: tzinfo | None
) -> tuple[str, Mapping[str, str]]:
    """The due time and the headers by a wall time and a window. Raises InvalidMessage."""
    from lisa.core.model.windows.placing import clock_ms, place  # late: few programs use it

    headers = checked_headers(options.get("headers"))
    return place({**options, "headers": headers}, due, zone, clock_ms())


def due_text(
    delay: timedelta | str | None,
    at: datetime | None,
    at_ms: int | None,
    zone: tzinfo | None,
) -> str | None:
    """A due time for a script: '+<ms>' for a delay, else epoch ms; None if none is given.

    Fractions of a millisecond are rounded up. Raises InvalidMessage.
    """
    if (delay is not None) + (at is not None) + (at_ms is not None) > 1:
        raise InvalidMessage("give one of delay, at and at_ms; they contradict each other")
    if delay is not None:
        return f"+{checked_delay_ms(delay)}"
    if at is not None:
        return str(_at_ms(at, zone))
    return None if at_ms is None else str(check_due_ms(at_ms))


def _at_ms(at: datetime, zone: tzinfo | None) -> int:
    if not isinstance(at, datetime):
        raise InvalidMessage(f"at is a datetime, not {at!r}; for epoch milliseconds use at_ms")
    try:
        return check_due_ms(datetime_ms(at, zone))
    except OverflowError:  # the zone's offset can exceed the limits of datetime
        raise InvalidMessage(f"the due time {at.isoformat()} is out of range") from None


def _policy(retry: Any, late: Any, cost: Any, slack: Any) -> str | None:
    delays = None if retry is None else RetryPolicy.parse(retry).encode()
    return message_policy(delays, own_late(late), own_lane(cost, slack))


def _on_duplicate(value: OnDuplicate | str) -> OnDuplicate:
    try:
        return _MODES[value]
    except (KeyError, TypeError):
        allowed = ", ".join(OnDuplicate)
        raise InvalidMessage(f"on_duplicate is one of {allowed}, not {value!r}") from None
