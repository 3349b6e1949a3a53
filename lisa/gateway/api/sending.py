"""Operations that send one message or a batch."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType, defstruct

from lisa.core.model.errors import InvalidMessage, LisaError, NotReplicated, ServerUnavailable
from lisa.core.model.keys import keyed_id, shown_id
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.gateway.access import Scope
from lisa.gateway.api.operations import MESSAGES, TOPIC, Call, Operations, Reply, answer, in_turns
from lisa.gateway.api.types import (
    MOST_ITEMS,
    Answer,
    AnswerWithId,
    NoFields,
    OwnId,
    Problem,
    Request,
    given_options,
    invalid,
    key_field,
    option_fields,
    problem_answer,
    read_body,
    read_json,
)
from lisa.gateway.context import gather_parts
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.trace_context import trace_context, with_trace
from lisa.producer import Outgoing, SendOptions, SendOutcome, Single

if TYPE_CHECKING:

    class _SendFields(Request):
        body: Raw | UnsetType = UNSET
        body_base64: str | None = None
        id: str | None = None
        key: str | None = None
        on_duplicate: OnDuplicate | None = None

else:
    _JSON = Meta(description="Any JSON value. Exactly one of `body` and `body_base64`.")
    _BASE64 = Meta(
        description="A binary body in base64 (RFC 4648, section 4).",
        extra_json_schema={"contentEncoding": "base64"},
    )
    _ID = Meta(description="Your own id, for idempotent sends; by default an id is generated.")
    _OPTIONS = option_fields(SendOptions)
    # The send token of an Idempotency-Key depends on the order of the fields.
    _OPTIONS.insert(
        [name for name, *_ in _OPTIONS].index("ttl_ms"),
        ("id", Annotated[OwnId | None, _ID], None),
    )
    _SendFields = defstruct(
        "_SendFields",
        [
            ("body", Annotated[Raw | UnsetType, _JSON], UNSET),
            ("body_base64", Annotated[str | None, _BASE64], None),
            *_OPTIONS,
        ],
        bases=(Request,),
        kw_only=True,
    )

HEADER = "idempotency-key"
LONGEST = 255

KNOWN = (
    "The id existed: `duplicate` if the earlier message was kept, `replaced` if this message "
    "replaced it, `replaced_in_flight` if a consumer may still handle the earlier one as well, "
    "`updated` if this message took its due time."
)
KEY_REUSED = "The `Idempotency-Key` was used for a request with other content."


class SendRequest(_SendFields):
    """A message to send. Due now, or according to one of `delay_ms`, `due_ms` and `at_local`."""


class SendAnswer(AnswerWithId, kw_only=True):
    """The outcome of sending one message."""

    outcome: Sent


class BatchRequest(Request):
    """A batch of messages, each with the fields of a single send."""

    # Items are decoded separately, so that an invalid item does not fail the others.
    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MOST_ITEMS)]
    on_duplicate: Annotated[
        OnDuplicate | None,
        Meta(description="Default for messages without their own `on_duplicate`."),
    ] = None


class BatchResult(Answer):
    """The result for one message of a batch: an outcome, or its problem."""

    id: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    outcome: Sent | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class BatchAnswer(Answer):
    """The results in request order, and counts by outcome."""

    results: list[BatchResult]
    accepted: int
    duplicate: int
    replaced: int
    replaced_in_flight: int
    updated: int
    rejected: int
    failed: Annotated[
        int, Meta(description="Messages with a problem, which may have to be sent again.")
    ]


class Idempotency:
    """The ids and the send token of one request with an idempotency key.

    A key belongs to a topic and to the token that authorises the request.
    """

    def __init__(self, topic: str, client: str, key: str, content: bytes) -> None:
        self._scope = f"{topic}\0{client}\0{key}"
        self.token = self._digest(6, content)
        self._ids: set[str] = set()

    def id_of(self, index: int = 0) -> str:
        """The id of the request's message with this index, if the request does not name one."""
        return f"key-{self._digest(18, b'%d' % index)}"

    def check_once(self, item: SendRequest) -> None:
        """Refuse an id of a batch that an earlier message has. Raises ErrorResponse.

        Both have the same send token, so Redis may take the second for a repetition of the first.
        """
        if item.id is None:
            return
        message_id = keyed_id(item.key, item.id)
        if message_id in self._ids:
            raise invalid(
                f"an earlier message of this batch has the id {shown_id(message_id)!r}; with an "
                "Idempotency-Key, each id may occur once"
            )
        self._ids.add(message_id)

    def _digest(self, size: int, content: bytes) -> str:
        """`size` bytes that depend on the key and on the content, as URL-safe text."""
        digest = hashlib.sha256(self._scope.encode() + b"\0" + content).digest()
        return urlsafe_b64encode(digest[:size]).decode("ascii")


def idempotency_of(call: Call[Any, Any]) -> Idempotency | None:
    """The idempotency key of a send; None without the header. Raises ErrorResponse."""
    headers = call.request.headers.getlist(HEADER)
    if not headers:
        return None
    if len(headers) > 1:
        raise invalid("the request has several headers Idempotency-Key; send one")
    given = headers[0]
    key = given[1:-1] if len(given) > 1 and given[0] == given[-1] == '"' else given
    if not 1 <= len(key) <= LONGEST or not key.isascii() or not key.isprintable():
        raise invalid(f"Idempotency-Key must have 1 to {LONGEST} printable ASCII characters")
    return Idempotency(call.topic, call.token.name, key, msgspec.json.encode(call.body))


def key_reused(message_id: str) -> ErrorResponse:
    """The problem for a key that came with other content before."""
    return ErrorResponse(
        422,
        "idempotency-key-reused",
        "this Idempotency-Key was used for a request with other content; nothing was sent",
        id=message_id,
    )


_item_decoder = msgspec.json.Decoder(SendRequest)


operations = Operations("Sending")

_Found: TypeAlias = SendOutcome | LisaError | ErrorResponse


class _Ready(NamedTuple):
    """One valid message of a batch: its index, and its forms as given, checked and encoded."""

    position: int
    request: SendRequest
    mode: OnDuplicate
    outgoing: Outgoing
    single: Single


@operations.add(
    "POST",
    MESSAGES,
    {201: "Accepted.", 200: KNOWN},
    scope=Scope.PRODUCE,
    problems={
        409: "The id exists and `on_duplicate` is `reject`.",
        422: KEY_REUSED,
        429: "The topic has reached its `capacity`, or the key `max_per_key`.",
    },
    leads_to=("getMessage", "cancelMessage", "rescheduleMessage", "fireMessage"),
)
async def send_message(call: Call[NoFields, SendRequest]) -> Reply[SendAnswer]:
    """Send a message.

    If the request has the header `traceparent`, and the message has no header of that name, the
    message gets `traceparent` and `tracestate`.

    With the header `Idempotency-Key`, a repeated request gets the first response and sends nothing,
    for as long as the topic remembers the message's id (`retention`).
    """
    request, key = call.body, idempotency_of(call)
    outgoing = _outgoing(request, trace_context(call.request.headers), key)
    sent = await call.gateway.sender.offer(
        call.topic, outgoing, _mode(request, outgoing, OnDuplicate.KEEP), key.token if key else None
    )
    if _is_reused(request, key, sent):
        raise key_reused(sent.id)
    if sent.outcome is Sent.REJECTED:
        raise ErrorResponse(
            409,
            "duplicate",
            f"message {shown_id(sent.id)!r} already exists on topic {call.topic!r}",
            id=sent.id,
            outcome=sent.outcome,
        )
    status = 201 if sent.outcome is Sent.ACCEPTED else 200
    return answer(SendAnswer(id=sent.id, outcome=sent.outcome), status)


@operations.add(
    "POST",
    f"{TOPIC}/messages:batch",
    "The result of each message, even if some failed.",
    scope=Scope.PRODUCE,
)
async def send_messages(call: Call[NoFields, BatchRequest]) -> BatchAnswer:
    """Send many messages.

    Sends at most 1,000 messages. Each has its own result, in request order: an invalid message gets
    a problem, the others are sent. If Redis does not respond and no message was sent, the response
    is 503.

    `Idempotency-Key` works as for a single send. An id may then occur only once in the batch.
    """
    default, key = call.body.on_duplicate or OnDuplicate.KEEP, idempotency_of(call)
    trace = trace_context(call.request.headers)
    found: dict[int, _Found] = {**call.failed}
    ready: list[_Ready] = []
    async for index, raw in in_turns(enumerate(call.body.messages)):
        if index in found:
            continue
        try:
            item = read_json(_item_decoder, raw)
            if key:
                key.check_once(item)
            outgoing = _outgoing(item, trace, key, index)
            prepared = call.gateway.sender.prepare(outgoing)
            ready.append(_Ready(index, item, _mode(item, outgoing, default), outgoing, prepared))
        except (ErrorResponse, InvalidMessage) as error:
            found[index] = error
    outage: ServerUnavailable | None = None
    token = key.token if key else None
    for part in _by_mode(ready):
        if outage is None:
            sent = await _send_part(call, part, token)
            outage = next(
                (outcome for outcome in sent if isinstance(outcome, ServerUnavailable)), None
            )
        else:  # the batch waits out an outage once, not per part
            sent = [_not_sent(outage)] * len(part)
        for message, result in zip(part, sent, strict=True):
            if isinstance(result, SendOutcome) and _is_reused(message.request, key, result):
                found[message.position] = key_reused(result.id)
            else:
                found[message.position] = result
    results = [found[index] for index in sorted(found)]
    if outage and all(isinstance(result, ServerUnavailable) for result in results):
        raise _whole(outage, results)
    return _batch_answer(results)


def _mode(request: SendRequest, outgoing: Outgoing, default: OnDuplicate) -> OnDuplicate:
    """What to do if the id exists; without an id of its own, a message is new or a repetition.

    That of coalescing sends only keeps them together.
    """
    if outgoing.is_coalescing:
        return OnDuplicate.UPDATE
    return OnDuplicate.KEEP if request.id is None else request.on_duplicate or default


def _by_mode(ready: Sequence[_Ready]) -> list[list[_Ready]]:
    """The messages in few parts of one mode each. Messages with the same id stay in order."""
    parts: list[list[_Ready]] = []
    part_of: dict[str, int] = {}  # the last part with a message of this id
    for message in ready:
        own = message.single.id
        whole = None if own is None else keyed_id(message.single.key, own)
        index = 0 if whole is None else part_of.get(whole, 0)
        while index < len(parts) and parts[index][0].mode is not message.mode:
            index += 1
        if index == len(parts):
            parts.append([])
        parts[index].append(message)
        if whole is not None:
            part_of[whole] = index
    return parts


def _is_reused(request: SendRequest, key: Idempotency | None, sent: SendOutcome) -> bool:
    """Whether another request has used the key: repetitions get the first outcome."""
    return key is not None and request.id is None and sent.outcome is Sent.DUPLICATE


async def _send_part(
    call: Call[Any, Any], part: Sequence[_Ready], token: str | None
) -> list[_Found]:
    """The result of each message. If one is invalid, the others of its call are sent singly."""
    sender, topic, mode = call.gateway.sender, call.topic, part[0].mode
    sent = await sender.offer_many(topic, [message.single for message in part], mode, token)
    found: list[_Found] = list(sent)
    refused = [index for index, outcome in enumerate(sent) if isinstance(outcome, InvalidMessage)]
    singly = await gather_parts(
        sender.offer(topic, part[index].outgoing, mode, token) for index in refused
    )
    for index, outcome in zip(refused, singly, strict=True):
        found[index] = outcome
    return found


def _not_sent(outage: ServerUnavailable) -> ServerUnavailable:
    """The error of messages that were not sent after an outage."""
    is_written = isinstance(outage, NotReplicated)
    return ServerUnavailable("not sent after an unconfirmed write") if is_written else outage


def _whole(outage: ServerUnavailable, results: Sequence[_Found]) -> ServerUnavailable:
    """The error of a batch without any outcome. It names the messages that were written."""
    if not (unsure := [result for result in results if isinstance(result, NotReplicated)]):
        return outage
    whole = NotReplicated(str(unsure[0]))
    whole.ids = tuple(name for error in unsure for name in error.ids)
    return whole


def _batch_answer(found: Sequence[_Found]) -> BatchAnswer:
    results = [
        BatchResult(id=outcome.id, key=key_field(outcome.id), outcome=outcome.outcome)
        if isinstance(outcome, SendOutcome)
        else _failed_result(outcome)
        for outcome in found
    ]
    counts = Counter(outcome.outcome for outcome in found if isinstance(outcome, SendOutcome))
    return BatchAnswer(
        results=results,
        failed=len(found) - counts.total(),
        **{outcome.value: counts[outcome] for outcome in Sent},
    )


def _failed_result(error: LisaError | ErrorResponse) -> BatchResult:
    """The result of a message that was not sent, or was written, but not confirmed.

    It names the id of the latter, which the client may send again.
    """
    problem = problem_answer(error)
    if not isinstance(error, NotReplicated):
        return BatchResult(problem=problem)
    written = error.ids[0]
    return BatchResult(id=written, key=key_field(written), problem=problem)


def _outgoing(
    request: SendRequest, trace: Mapping[str, str], key: Idempotency | None, index: int = 0
) -> Outgoing:
    options = given_options(request, SendOptions)
    options.pop("on_duplicate", None)
    options["headers"] = with_trace(options.get("headers"), trace)
    body = read_body(request.body, request.body_base64)
    outgoing = Outgoing(body, id=request.id, **options)
    if outgoing.is_coalescing and request.on_duplicate is not None:
        raise InvalidMessage(
            "debounce, throttle and latest say what is replaced; omit on_duplicate"
        )
    if key and request.id is None and not outgoing.is_coalescing:
        return Outgoing(body, id=key.id_of(index), **options)
    return outgoing
