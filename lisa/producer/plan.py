"""Checks the options of one call and converts them to the form that the scripts read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta, tzinfo
from inspect import Parameter, cleandoc, signature
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import msgspec

from lisa.core.model.clock import (
    check_due_ms,
    checked_delay_ms,
    checked_ttl_ms,
    datetime_ms,
    human,
    parse_zone,
)
from lisa.core.model.envelope import checked_headers, encode_headers
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import LOCAL_HEADER, WINDOW_HEADER, check_key
from lisa.core.model.lanes import own_lane
from lisa.core.model.late import LatePolicy, message_policy, own_late
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.transitions.coalesce import is_rule
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
    debounce: of a key's sends, only the last is handled, once there was none for this long. Each
        replaces the one before, unless a handler has begun with that. Needs `key`, as do the next
        two; the message has a fixed id, and is due as the option says.
    max_wait: with `debounce`, the longest time from the first of these sends until one is due.
    throttle: of a key's sends, one is due at once, and the next one not before this time has passed
        since. Of those in between, the last is handled.
    latest: True if the message replaces the last one of its key that no handler has begun with, and
        is due when that one was.
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
    debounce: timedelta | str | None
    max_wait: timedelta | str | None
    throttle: timedelta | str | None
    latest: bool | None
    on_duplicate: OnDuplicate | str | None


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
_COALESCING = ("debounce", "throttle", "latest")
_TIMING = (*_DUES, "debounce", "throttle")
"""The options that say when a message is due; one of a message replaces those of its call."""

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
    debounce: timedelta | str | None = None
    max_wait: timedelta | str | None = None
    throttle: timedelta | str | None = None
    latest: bool | None = None

    @property
    def is_coalescing(self) -> bool:
        """Whether one message may stand for this one and other sends of its key."""
        return self.debounce is not None or self.throttle is not None or bool(self.latest)

    @property
    def is_special(self) -> bool:
        """Whether the message has a wall time, a window, a zone or a coalescing option."""
        return (
            self.at_local is not None
            or self.window is not None
            or self.business_days is not None
            or self.tz is not None
            or self.fold is not None
            or self.debounce is not None
            or self.max_wait is not None
            or self.throttle is not None
            or self.latest is not None
            or (self.headers is not None and _are_by_calendar(self.headers))
        )


class SendPlan(NamedTuple):
    """The options of a call, or of one of its messages, in the form that the scripts read.

    due: the rule of a coalescing send, as in the header of `lua/coalesce.lua`, or a due time.
    """

    due: str = NOW
    ttl_ms: int | None = None
    policy: str | None = None
    headers: bytes = b"0000"
    on_duplicate: OnDuplicate = OnDuplicate.KEEP
    zone: tzinfo | None = None
    options: SendOptions | None = None
    """The options as they were given."""
    key: str | None = None
    is_by_calendar: bool = False
    """Whether a wall time or a window is among them."""

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
        mode = options.get("on_duplicate")
        rule = _rule(options, due or NOW)
        return cls(
            rule or due or NOW,
            None if ttl is None else checked_ttl_ms(ttl),
            _policy(*map(options.get, _POLICIES)),
            encode_headers(headers),
            # The nearest mode, so that no other sends are in the same batch.
            OnDuplicate.UPDATE
            if rule
            else _on_duplicate(OnDuplicate.KEEP if mode is None else mode),
            zone,
            options,
            None if key is None else check_key(key),
            is_by_calendar,
        )

    def with_differences(self, message: Outgoing) -> SendPlan:
        """The plan of one message that overrides the call's options. Raises InvalidMessage."""
        if self.is_by_calendar or message.is_special:
            return self._merged(message)
        due = due_text(message.delay, message.at, message.at_ms, self.zone)
        if due is not None and is_rule(self.due):
            return self._merged(message)  # which raises, except for `latest`
        # `_replace` is slower, which matters for ten million messages.
        return SendPlan(
            due or self.due,
            self.ttl_ms if message.ttl is None else checked_ttl_ms(message.ttl),
            self._policy_of(message),
            self.headers if message.headers is None else encode_headers(message.headers),
            self.on_duplicate,
            self.zone,
            self.options,
            self.key if message.key is None else check_key(message.key),
        )

    def _policy_of(self, message: Outgoing) -> str | None:
        own = (message.retry, message.late, message.cost, message.slack)
        if own == (None, None, None, None):
            return self.policy
        given = map((self.options or {}).get, _POLICIES)
        return _policy(*(b if a is None else a for a, b in zip(own, given, strict=True)))

    def _merged(self, message: Outgoing) -> SendPlan:
        """The plan of one message by all options together. Raises InvalidMessage."""
        options: dict[str, Any] = {**(self.options or {})}
        own = {name: getattr(message, name) for name in _DIFFERENCES}
        if any(own[name] is not None for name in _TIMING):
            for name in (*_TIMING, "fold", "business_days", "max_wait"):
                options.pop(name, None)
        if any(own[name] is not None for name in _COALESCING):
            for name in (*_COALESCING, "max_wait"):
                options.pop(name, None)
        options.update({name: value for name, value in own.items() if value is not None})
        return SendPlan.of(cast(SendOptions, options), self.zone)


def _rule(options: SendOptions, due: str) -> str | None:
    """The rule of a coalescing send, None for another. Raises InvalidMessage."""
    debounce, throttle = options.get("debounce"), options.get("throttle")
    latest, max_wait = options.get("latest"), options.get("max_wait")
    if latest not in (None, True, False):
        raise InvalidMessage(f"latest is True or False, not {latest!r}")
    if max_wait is not None and debounce is None:
        raise InvalidMessage("max_wait limits a debounce; give debounce, too, or leave it out")
    values = zip(_COALESCING, (debounce, throttle, latest or None), strict=True)
    given = [name for name, value in values if value is not None]
    if not given:
        return None
    _check_alone(given, options)
    if debounce is not None:
        return _debounce_rule(debounce, max_wait)
    return f"l{due}" if throttle is None else f"t{_span_ms('throttle', throttle)}"


def _check_alone(given: Sequence[str], options: SendOptions) -> None:
    """Raise InvalidMessage if an option contradicts those of the names `given`."""
    if len(given) > 1:
        raise InvalidMessage(f"give one of {' and '.join(given)}; they contradict each other")
    if options.get("on_duplicate") is not None:
        raise InvalidMessage(f"{given[0]} says what is replaced; leave out on_duplicate")
    dues = [name for name in _DUES if options.get(name) is not None]
    if dues and given[0] != "latest":
        raise InvalidMessage(f"{given[0]} says when the message is due; leave out {dues[0]}")


def _debounce_rule(debounce: timedelta | str, max_wait: timedelta | str | None) -> str:
    quiet_ms = _span_ms("debounce", debounce)
    if max_wait is None:
        return f"d{quiet_ms},"
    most_ms = _span_ms("max_wait", max_wait)
    if most_ms < quiet_ms:
        raise InvalidMessage(
            f"max_wait {human(most_ms)} is shorter than debounce {human(quiet_ms)}, which would "
            "have no effect"
        )
    return f"d{quiet_ms},{most_ms}"


def _span_ms(name: str, value: timedelta | str) -> int:
    span_ms = checked_delay_ms(value, name)
    if not span_ms:
        raise InvalidMessage(f"{name} must exceed 0")
    return span_ms


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


def new_due(
    options: DueOptions, zone: tzinfo | None
) -> tuple[str | None, tzinfo | None, dict[str, Any]]:
    """What a reschedule asks for: a due time, the zone, and the options of the calendar given.

    zone: the producer's default zone. Raises InvalidMessage, or TypeError for an unknown option.
    """
    check_options(options, DueOptions)
    zone = zone if (tz := options.get("tz")) is None else parse_zone(tz)
    due = due_text(options.get("delay"), options.get("at"), options.get("at_ms"), zone)
    given = {name: options.get(name) for name in ("at_local", "fold", "business_days")}
    calendar = {name: value for name, value in given.items() if value is not None}
    if due is None and not calendar:
        raise InvalidMessage(
            "reschedule needs delay, at, at_ms or at_local; fire_now makes it due now"
        )
    if calendar:
        from lisa.core.model.windows.placing import asked_local, clock_ms  # late: as in `_placed`

        # Where no zone is known, that of the message's window may apply.
        asked_local(calendar, due, zone or UTC, None, clock_ms())
    return due, zone, calendar


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
