"""What the native API takes and answers, as types; the OpenAPI document's schemas come from here.

In requests `null` is as good as leaving a field out, except for `body`, where it is a value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lisa.admin.messages import State
from lisa.core.clock import MAX_DUE_MS, duration_ms
from lisa.core.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.outcomes import Discard
from lisa.core.retry_policy import MAX_DELAY, MAX_RETRIES
from lisa.core.transitions.ack import Acked
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.reschedule import Rescheduled
from lisa.core.transitions.retry import Failed
from lisa.gateway.waiting import MOST
from lisa.producer.found import State as FoundState

MOST_ITEMS = 1_000
LONGEST_WAIT_MS = 60_000
MOST_ROWS = 500

_LONGEST_RETRY_MS = duration_ms(MAX_DELAY)

Instant = Annotated[int, Meta(ge=0, le=MAX_DUE_MS, description="Epoch milliseconds, UTC.")]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_DUE_MS)]
RetryPause = Annotated[int, Meta(ge=0, le=_LONGEST_RETRY_MS)]
AckTimeout = Annotated[
    int,
    Meta(ge=duration_ms(MIN_ACK_TIMEOUT), le=duration_ms(MAX_ACK_TIMEOUT),
         description="How long the delivery may stay unsettled; by default as the topic says."),
]  # fmt: skip
MessageId = Annotated[
    str, Meta(min_length=1, max_length=256, description="1 to 256 bytes, no control characters.")
]
ReceiptText = Annotated[
    str, Meta(min_length=1, max_length=2_048, description="The delivery's receipt, as pulled.")
]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
ReasonText = Annotated[str, Meta(max_length=1_024)]
Retries: TypeAlias = Annotated[list[RetryPause], Meta(max_length=MAX_RETRIES)] | str
Cursor = Annotated[
    str, Meta(max_length=4_096, description="The `cursor` of the page before; none for the first.")
]
Limit = Annotated[int, Meta(ge=1, le=MOST_ROWS, description="Rows of one page, at most.")]


def _one_of(*values: str) -> Meta:
    """Which of an enumeration's values an answer may hold: those of problems are left out."""
    return Meta(extra_json_schema={"enum": [str(one) for one in values]})


class _Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request's body or query."""


class _Answer(msgspec.Struct, kw_only=True):
    """What is answered."""


class NoFields(_Request):
    """Nothing: what an operation takes that has no parameters, or no body."""


class SendRequest(_Request):
    """One message to send. It is due now, or as one of `delay_ms` and `due_ms` says."""

    body: Annotated[
        Raw | UnsetType, Meta(description="Any JSON value. Exactly one of body and body_base64.")
    ] = UNSET
    body_base64: Annotated[
        str | None,
        Meta(
            description="Bytes instead, in base64 (RFC 4648, section 4).",
            extra_json_schema={"contentEncoding": "base64"},
        ),
    ] = None
    delay_ms: Annotated[Milliseconds | None, Meta(description="By the server's clock.")] = None
    due_ms: Instant | None = None
    id: Annotated[
        MessageId | None,
        Meta(description="Your own id: a send repeated with it adds nothing. Else one is made."),
    ] = None
    ttl_ms: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DUE_MS)] | None,
        Meta(description="How long after due it is still worth handling."),
    ] = None
    headers: Annotated[
        dict[str, str] | None, Meta(description="Text to text, 65,535 bytes of JSON at most.")
    ] = None
    retry: Annotated[
        Retries | None,
        Meta(description="Its own pauses between attempts: milliseconds, or text as in '0,0,2m'; "
             "an empty list for a single attempt."),
    ] = None  # fmt: skip
    on_duplicate: Annotated[
        OnDuplicate | None,
        Meta(description="Where the id is known: keep the earlier message (the default), replace "
             "it, or reject the new one."),
    ] = None  # fmt: skip


class SendAnswer(_Answer):
    """What became of one message."""

    id: str
    outcome: Sent


class BatchRequest(_Request):
    """Messages to send; each is as in a single send."""

    # Each item is read by itself, so that one at fault does not stop the others.
    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MOST_ITEMS)]
    on_duplicate: Annotated[
        OnDuplicate | None, Meta(description="For the messages that say nothing themselves.")
    ] = None


class Problem(msgspec.Struct, kw_only=True):
    """Why something was not done (RFC 9457). `type` is what programs go by."""

    type: str
    title: str
    status: int
    detail: str
    id: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    state: str | UnsetType = UNSET
    held: bool | UnsetType = UNSET


class BatchResult(_Answer):
    """One message of a batch: its outcome, or the problem because of which it was not sent."""

    id: str | UnsetType = UNSET
    outcome: Sent | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class BatchAnswer(_Answer):
    """Results in the order of the messages, and how many there are of each kind."""

    results: list[BatchResult]
    accepted: int
    duplicate: int
    replaced: int
    rejected: int
    failed: Annotated[int, Meta(description="Messages with a problem; send those again.")]


class ListQuery(_Request):
    """Which messages are listed."""

    state: State = State.WAITING
    group: Annotated[Name | None, Meta(description="By default all groups.")] = None
    due_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


class ListedMessage(_Answer):
    """One message in one place, without its body."""

    id: str
    state: State
    group: Annotated[str | None, Meta(description="Null while it waits.")]
    due_ms: Annotated[
        int | None, Meta(description="Of the present or next attempt; in garbage, of its death.")
    ]
    attempts: Annotated[int, Meta(description="Those that failed.")]
    consumer: str | None
    idle_ms: int | None
    reason: Annotated[str | None, Meta(description="Why it last failed.")]
    expires_ms: int | None


class MessagesAnswer(_Answer):
    """A page of messages; `cursor` is null at the end."""

    messages: list[ListedMessage]
    cursor: str | None


class PlaceAnswer(_Answer):
    """How one group has a message."""

    state: FoundState
    due_ms: int | None
    attempts: Annotated[int, Meta(description="Those begun, the present one among them.")]
    consumer: str | None
    idle_ms: int | None
    reason: str | None


class MessageAnswer(PlaceAnswer):
    """A message as it stands. One that is settled has neither body nor headers left."""

    id: str
    topic: str
    headers: dict[str, str]
    groups: dict[str, PlaceAnswer]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class CancelAnswer(_Answer):
    """The message will not be handled."""

    id: str
    outcome: Annotated[str, _one_of(Cancelled.CANCELLED)]


class RescheduleRequest(_Request):
    """A new due time: exactly one of the two."""

    due_ms: Instant | None = None
    delay_ms: Milliseconds | None = None


class RescheduleAnswer(_Answer):
    """The message has its new due time."""

    id: str
    outcome: Annotated[str, _one_of(Rescheduled.RESCHEDULED)]


class ReceiptRequest(_Request):
    """Which delivery is meant."""

    receipt: ReceiptText


class AckAnswer(_Answer):
    """It is settled. `late`: after its ack timeout; `repeated`: an earlier call had done it."""

    id: str
    outcome: Annotated[str, _one_of(Acked.ACKED, Acked.LATE, Acked.REPEATED)]


class RetryRequest(_Request):
    """A delivery that failed."""

    receipt: ReceiptText
    delay_ms: Annotated[
        RetryPause | None, Meta(description="Until the next attempt; by default as the policy says")
    ] = None
    reason: Annotated[str | None, Meta(description="Why; 1,024 bytes of it are kept.")] = None
    discard: Annotated[bool, Meta(description="To garbage at once.")] = False

    @property
    def said(self) -> str:
        """The reason that is kept."""
        return self.reason or (str(Discard()) if self.discard else "the client asked for a retry")


class RetryAnswer(_Answer):
    """Where it went: `dead` is in garbage. `due_ms` is that of the next attempt."""

    id: str
    outcome: Annotated[str, _one_of(Failed.RETRYING, Failed.DEAD)]
    due_ms: int | None
    attempts: Annotated[int, Meta(description="Those that failed.")]


class ExtendRequest(_Request):
    """A delivery whose ack timeout is to begin anew."""

    receipt: ReceiptText
    ack_timeout_ms: Annotated[
        AckTimeout | None, Meta(description="From now on; by default as it was pulled.")
    ] = None


class HeldAnswer(_Answer):
    """Whether the delivery was yours; here it was, else the answer is a problem."""

    id: str
    held: Annotated[bool, Meta(extra_json_schema={"const": True})]


class PullRequest(_Request):
    """What is wanted. The answer comes with the first messages, or empty when the time is up."""

    max: Annotated[int, Meta(ge=1, le=MOST)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=LONGEST_WAIT_MS)] = 0
    ack_timeout_ms: AckTimeout | None = None
    group: Annotated[
        Name | None, Meta(description="By default the topic's only one.")
    ] = None  # fmt: skip


class DeliveryAnswer(_Answer):
    """One message in your hands, until its ack timeout ends."""

    id: str
    receipt: str
    attempt: Annotated[int, Meta(description="1, 2, ...")]
    due_ms: int
    headers: dict[str, str]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class PullAnswer(_Answer):
    """The deliveries, none if the time was up."""

    deliveries: list[DeliveryAnswer]


class GarbageQuery(_Request):
    """Which dead messages are listed."""

    group: Name | None = None
    reason: Annotated[
        ReasonText | None,
        Meta(
            description="Only those whose reason holds this text, upper and lower case alike. "
            "A page may then be short, or empty: go by its cursor."
        ),
    ] = None
    died_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


class GarbageRequest(_Request):
    """Which dead messages are meant: those of `ids`, or with `all` every one that matches."""

    ids: Annotated[list[MessageId], Meta(min_length=1, max_length=MOST_ITEMS)] | None = None
    all: bool = False
    group: Annotated[Name | None, Meta(description="By default all groups.")] = None
    reason: ReasonText | None = None
    died_before_ms: Instant | None = None


class GarbageAnswer(_Answer):
    """How many messages it was done for; `missing` are ids that were in no such garbage."""

    done: int
    missing: list[str]


class OptionsRequest(_Request):
    """Options to set; null takes one back to what the configuration declares, else its default.

    Durations are text with a unit, policies as in `0,0,2m`, an unlimited capacity is `unlimited`.
    """

    ack_timeout: str | UnsetType | None = UNSET
    retry_delays: list[str] | str | UnsetType | None = UNSET
    max_ready: int | str | UnsetType | None = UNSET
    capacity: int | str | UnsetType | None = UNSET
    retention: str | UnsetType | None = UNSET
    dedupe_for: str | UnsetType | None = UNSET
    garbage_keep: str | UnsetType | None = UNSET
    journal: bool | UnsetType | None = UNSET
    journal_max: int | str | UnsetType | None = UNSET
    max_body_bytes: int | str | UnsetType | None = UNSET
    shards: int | str | UnsetType | None = UNSET
    paused: bool | UnsetType | None = UNSET


class OptionsAnswer(_Answer):
    """All options, in the form in which they may be set."""

    ack_timeout: str
    retry_delays: str
    max_ready: int
    capacity: int | Literal["unlimited"]
    retention: str
    dedupe_for: str
    garbage_keep: str
    journal: bool
    journal_max: int
    max_body_bytes: int
    shards: int
    paused: bool


class PausedAnswer(_Answer):
    """Whether the topic is paused now, and whether this call changed it."""

    paused: bool
    changed: bool


class GroupAnswer(_Answer):
    """One group's counts."""

    name: str
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_retry_ms: int | None


class GroupsAnswer(_Answer):
    """The groups declared on a topic."""

    groups: list[GroupAnswer]


class GroupRequest(_Request):
    """A group to declare."""

    group: Name


class DeclaredAnswer(_Answer):
    """The group is declared; `new` unless it was before."""

    group: str
    new: bool


class RemovedAnswer(_Answer):
    """The group is gone, and so many messages ended with it."""

    group: str
    settled: int


class TopicCounts(_Answer):
    """A topic's counts. Those of states are sums over its groups."""

    topic: str
    paused: bool
    waiting: int
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_due_ms: int | None
    groups: list[GroupAnswer]


class TopicAnswer(TopicCounts):
    """A topic: counts, options, and counters since it began, each by its name."""

    counters: dict[str, int]
    options: OptionsAnswer


class TopicsQuery(_Request):
    """Which topics are listed."""

    cursor: Annotated[str, Meta(max_length=256)] | None = None
    limit: Limit = 100


class TopicsAnswer(_Answer):
    """A page of topics, in order of name; `cursor` is null at the end."""

    topics: list[TopicCounts]
    cursor: str | None


class Activity(TopicCounts):
    """One event of a topic's stream: its counts, and what went on since the look before."""

    at_ms: int
    in_per_s: float
    out_per_s: float
    retried_per_s: float
    garbage_per_s: float
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None


class RolesQuery(_Request):
    """Whose consumers are listed."""

    topic: Annotated[Name | None, Meta(description="By default all topics.")] = None


class ConsumerAnswer(_Answer):
    """One consumer on one topic, as it last said of itself."""

    name: str
    topic: str
    group: Annotated[str | None, Meta(description="Null while it waits for one to be declared.")]
    host: str
    pid: int
    started_ms: int
    seen_ms: int
    silent_ms: int
    alive: bool
    concurrency: int
    running: int
    held: int
    handled: int
    state: str


class ConsumersAnswer(_Answer):
    """Consumers, gone ones included."""

    consumers: list[ConsumerAnswer]


class ManagerAnswer(_Answer):
    """One manager, as it last said of itself."""

    name: str
    host: str
    pid: int
    started_ms: int
    seen_ms: int
    silent_ms: int
    alive: bool
    topics: int


class ManagersAnswer(_Answer):
    """Managers, gone ones included."""

    managers: list[ManagerAnswer]
