from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Problem(_message.Message):
    __slots__ = ("type", "title", "status", "detail", "id", "outcome", "state", "held", "ids", "key")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    type: str
    title: str
    status: int
    detail: str
    id: str
    outcome: str
    state: str
    held: bool
    ids: _containers.RepeatedScalarFieldContainer[str]
    key: str
    def __init__(self, type: _Optional[str] = ..., title: _Optional[str] = ..., status: _Optional[int] = ..., detail: _Optional[str] = ..., id: _Optional[str] = ..., outcome: _Optional[str] = ..., state: _Optional[str] = ..., held: bool = ..., ids: _Optional[_Iterable[str]] = ..., key: _Optional[str] = ...) -> None: ...

class OutgoingMessage(_message.Message):
    __slots__ = ("body_json", "body_bytes", "delay_ms", "due_ms", "id", "ttl_ms", "headers", "retry", "on_duplicate", "at_local", "tz", "fold", "business_days", "window", "late", "key", "cost", "slack_ms", "debounce_ms", "max_wait_ms", "throttle_ms", "latest")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    ON_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    AT_LOCAL_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    FOLD_FIELD_NUMBER: _ClassVar[int]
    BUSINESS_DAYS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    SLACK_MS_FIELD_NUMBER: _ClassVar[int]
    DEBOUNCE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    THROTTLE_MS_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    body_json: str
    body_bytes: bytes
    delay_ms: int
    due_ms: int
    id: str
    ttl_ms: int
    headers: _containers.ScalarMap[str, str]
    retry: str
    on_duplicate: str
    at_local: str
    tz: str
    fold: int
    business_days: int
    window: str
    late: str
    key: str
    cost: int
    slack_ms: int
    debounce_ms: int
    max_wait_ms: int
    throttle_ms: int
    latest: bool
    def __init__(self, body_json: _Optional[str] = ..., body_bytes: _Optional[bytes] = ..., delay_ms: _Optional[int] = ..., due_ms: _Optional[int] = ..., id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ..., retry: _Optional[str] = ..., on_duplicate: _Optional[str] = ..., at_local: _Optional[str] = ..., tz: _Optional[str] = ..., fold: _Optional[int] = ..., business_days: _Optional[int] = ..., window: _Optional[str] = ..., late: _Optional[str] = ..., key: _Optional[str] = ..., cost: _Optional[int] = ..., slack_ms: _Optional[int] = ..., debounce_ms: _Optional[int] = ..., max_wait_ms: _Optional[int] = ..., throttle_ms: _Optional[int] = ..., latest: bool = ...) -> None: ...

class SendMessageRequest(_message.Message):
    __slots__ = ("topic", "message")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    message: OutgoingMessage
    def __init__(self, topic: _Optional[str] = ..., message: _Optional[_Union[OutgoingMessage, _Mapping]] = ...) -> None: ...

class SendAnswer(_message.Message):
    __slots__ = ("id", "outcome", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: str
    key: str
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class SendMessagesRequest(_message.Message):
    __slots__ = ("topic", "messages", "on_duplicate")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ON_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    messages: _containers.RepeatedCompositeFieldContainer[OutgoingMessage]
    on_duplicate: str
    def __init__(self, topic: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[OutgoingMessage, _Mapping]]] = ..., on_duplicate: _Optional[str] = ...) -> None: ...

class BatchAnswer(_message.Message):
    __slots__ = ("results", "accepted", "duplicate", "replaced", "rejected", "failed", "replaced_in_flight", "updated")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REPLACED_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[BatchResult]
    accepted: int
    duplicate: int
    replaced: int
    rejected: int
    failed: int
    replaced_in_flight: int
    updated: int
    def __init__(self, results: _Optional[_Iterable[_Union[BatchResult, _Mapping]]] = ..., accepted: _Optional[int] = ..., duplicate: _Optional[int] = ..., replaced: _Optional[int] = ..., rejected: _Optional[int] = ..., failed: _Optional[int] = ..., replaced_in_flight: _Optional[int] = ..., updated: _Optional[int] = ...) -> None: ...

class BatchResult(_message.Message):
    __slots__ = ("id", "outcome", "problem", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: str
    problem: Problem
    key: str
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[str] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ..., key: _Optional[str] = ...) -> None: ...

class MessageRequest(_message.Message):
    __slots__ = ("topic", "id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class OutcomeAnswer(_message.Message):
    __slots__ = ("id", "outcome", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: str
    key: str
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class ListMessagesRequest(_message.Message):
    __slots__ = ("topic", "state", "group", "due_before_ms", "cursor", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DUE_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    state: str
    group: str
    due_before_ms: int
    cursor: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., state: _Optional[str] = ..., group: _Optional[str] = ..., due_before_ms: _Optional[int] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class MessagesAnswer(_message.Message):
    __slots__ = ("messages", "cursor")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ListedMessage]
    cursor: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ListedMessage, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListedMessage(_message.Message):
    __slots__ = ("id", "state", "group", "due_ms", "attempts", "consumer", "idle_ms", "reason", "traceback", "expires_ms", "deferrals", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    DEFERRALS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    group: str
    due_ms: int
    attempts: int
    consumer: str
    idle_ms: int
    reason: str
    traceback: str
    expires_ms: int
    deferrals: int
    key: str
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., group: _Optional[str] = ..., due_ms: _Optional[int] = ..., attempts: _Optional[int] = ..., consumer: _Optional[str] = ..., idle_ms: _Optional[int] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ..., expires_ms: _Optional[int] = ..., deferrals: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class GroupStateAnswer(_message.Message):
    __slots__ = ("state", "due_ms", "attempts", "consumer", "idle_ms", "reason", "traceback", "deferrals")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    DEFERRALS_FIELD_NUMBER: _ClassVar[int]
    state: str
    due_ms: int
    attempts: int
    consumer: str
    idle_ms: int
    reason: str
    traceback: str
    deferrals: int
    def __init__(self, state: _Optional[str] = ..., due_ms: _Optional[int] = ..., attempts: _Optional[int] = ..., consumer: _Optional[str] = ..., idle_ms: _Optional[int] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ..., deferrals: _Optional[int] = ...) -> None: ...

class MessageAnswer(_message.Message):
    __slots__ = ("state", "due_ms", "attempts", "consumer", "idle_ms", "reason", "traceback", "id", "topic", "headers", "groups", "body_json", "body_bytes", "deferrals", "key")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: GroupStateAnswer
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[GroupStateAnswer, _Mapping]] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEFERRALS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    state: str
    due_ms: int
    attempts: int
    consumer: str
    idle_ms: int
    reason: str
    traceback: str
    id: str
    topic: str
    headers: _containers.ScalarMap[str, str]
    groups: _containers.MessageMap[str, GroupStateAnswer]
    body_json: str
    body_bytes: bytes
    deferrals: int
    key: str
    def __init__(self, state: _Optional[str] = ..., due_ms: _Optional[int] = ..., attempts: _Optional[int] = ..., consumer: _Optional[str] = ..., idle_ms: _Optional[int] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ..., id: _Optional[str] = ..., topic: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., groups: _Optional[_Mapping[str, GroupStateAnswer]] = ..., body_json: _Optional[str] = ..., body_bytes: _Optional[bytes] = ..., deferrals: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class WhyAnswer(_message.Message):
    __slots__ = ("reasons",)
    REASONS_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedCompositeFieldContainer[ReasonAnswer]
    def __init__(self, reasons: _Optional[_Iterable[_Union[ReasonAnswer, _Mapping]]] = ...) -> None: ...

class ReasonAnswer(_message.Message):
    __slots__ = ("group", "state", "sentence", "until_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    state: str
    sentence: str
    until_ms: int
    def __init__(self, group: _Optional[str] = ..., state: _Optional[str] = ..., sentence: _Optional[str] = ..., until_ms: _Optional[int] = ...) -> None: ...

class RescheduleMessageRequest(_message.Message):
    __slots__ = ("topic", "id", "due_ms", "delay_ms", "at_local", "tz", "fold", "business_days")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    AT_LOCAL_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    FOLD_FIELD_NUMBER: _ClassVar[int]
    BUSINESS_DAYS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    due_ms: int
    delay_ms: int
    at_local: str
    tz: str
    fold: int
    business_days: int
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ..., due_ms: _Optional[int] = ..., delay_ms: _Optional[int] = ..., at_local: _Optional[str] = ..., tz: _Optional[str] = ..., fold: _Optional[int] = ..., business_days: _Optional[int] = ...) -> None: ...

class KeyRequest(_message.Message):
    __slots__ = ("topic", "key")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class ListKeyRequest(_message.Message):
    __slots__ = ("topic", "key", "cursor", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    cursor: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class KeyAnswer(_message.Message):
    __slots__ = ("topic", "key", "count", "messages", "cursor")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    count: int
    messages: _containers.RepeatedCompositeFieldContainer[KeyedMessage]
    cursor: str
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., count: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[KeyedMessage, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class KeyedMessage(_message.Message):
    __slots__ = ("state", "due_ms", "attempts", "consumer", "idle_ms", "reason", "traceback", "deferrals", "id", "key", "groups")
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: GroupStateAnswer
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[GroupStateAnswer, _Mapping]] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    DEFERRALS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    state: str
    due_ms: int
    attempts: int
    consumer: str
    idle_ms: int
    reason: str
    traceback: str
    deferrals: int
    id: str
    key: str
    groups: _containers.MessageMap[str, GroupStateAnswer]
    def __init__(self, state: _Optional[str] = ..., due_ms: _Optional[int] = ..., attempts: _Optional[int] = ..., consumer: _Optional[str] = ..., idle_ms: _Optional[int] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ..., deferrals: _Optional[int] = ..., id: _Optional[str] = ..., key: _Optional[str] = ..., groups: _Optional[_Mapping[str, GroupStateAnswer]] = ...) -> None: ...

class RescheduleKeyRequest(_message.Message):
    __slots__ = ("topic", "key", "due_ms", "delay_ms", "shift_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    SHIFT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    due_ms: int
    delay_ms: int
    shift_ms: int
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., due_ms: _Optional[int] = ..., delay_ms: _Optional[int] = ..., shift_ms: _Optional[int] = ...) -> None: ...

class KeyChangedAnswer(_message.Message):
    __slots__ = ("topic", "key", "changed", "results")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    changed: int
    results: _containers.RepeatedCompositeFieldContainer[KeyedOutcome]
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., changed: _Optional[int] = ..., results: _Optional[_Iterable[_Union[KeyedOutcome, _Mapping]]] = ...) -> None: ...

class KeyedOutcome(_message.Message):
    __slots__ = ("id", "key", "outcome")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    id: str
    key: str
    outcome: str
    def __init__(self, id: _Optional[str] = ..., key: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class ListLimitsRequest(_message.Message):
    __slots__ = ("topic", "cursor", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    cursor: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class LimitedKeysAnswer(_message.Message):
    __slots__ = ("topic", "keys", "cursor")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    keys: _containers.RepeatedCompositeFieldContainer[LimitsAnswer]
    cursor: str
    def __init__(self, topic: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[LimitsAnswer, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class LimitsRequest(_message.Message):
    __slots__ = ("topic", "key", "group")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    group: str
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class LimitsAnswer(_message.Message):
    __slots__ = ("key", "group", "rate", "concurrency", "weight")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    key: str
    group: str
    rate: str
    concurrency: int
    weight: int
    def __init__(self, key: _Optional[str] = ..., group: _Optional[str] = ..., rate: _Optional[str] = ..., concurrency: _Optional[int] = ..., weight: _Optional[int] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("topic", "key", "group", "rate", "concurrency", "weight")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    group: str
    rate: str
    concurrency: int
    weight: int
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., group: _Optional[str] = ..., rate: _Optional[str] = ..., concurrency: _Optional[int] = ..., weight: _Optional[int] = ...) -> None: ...

class LimitsChangedAnswer(_message.Message):
    __slots__ = ("key", "group", "rate", "concurrency", "weight", "changed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    key: str
    group: str
    rate: str
    concurrency: int
    weight: int
    changed: bool
    def __init__(self, key: _Optional[str] = ..., group: _Optional[str] = ..., rate: _Optional[str] = ..., concurrency: _Optional[int] = ..., weight: _Optional[int] = ..., changed: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("topic", "group", "max", "wait_ms", "ack_timeout_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    ACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    max: int
    wait_ms: int
    ack_timeout_ms: int
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., max: _Optional[int] = ..., wait_ms: _Optional[int] = ..., ack_timeout_ms: _Optional[int] = ...) -> None: ...

class PullAnswer(_message.Message):
    __slots__ = ("deliveries",)
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedCompositeFieldContainer[DeliveryAnswer]
    def __init__(self, deliveries: _Optional[_Iterable[_Union[DeliveryAnswer, _Mapping]]] = ...) -> None: ...

class DeliveryAnswer(_message.Message):
    __slots__ = ("id", "receipt", "attempt", "due_ms", "headers", "body_json", "body_bytes", "key")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    receipt: str
    attempt: int
    due_ms: int
    headers: _containers.ScalarMap[str, str]
    body_json: str
    body_bytes: bytes
    key: str
    def __init__(self, id: _Optional[str] = ..., receipt: _Optional[str] = ..., attempt: _Optional[int] = ..., due_ms: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ..., body_json: _Optional[str] = ..., body_bytes: _Optional[bytes] = ..., key: _Optional[str] = ...) -> None: ...

class AckMessageRequest(_message.Message):
    __slots__ = ("topic", "id", "receipt")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    receipt: str
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ..., receipt: _Optional[str] = ...) -> None: ...

class RetryMessageRequest(_message.Message):
    __slots__ = ("topic", "id", "receipt", "delay_ms", "reason", "discard")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    receipt: str
    delay_ms: int
    reason: str
    discard: bool
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ..., receipt: _Optional[str] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., discard: bool = ...) -> None: ...

class RetryAnswer(_message.Message):
    __slots__ = ("id", "outcome", "due_ms", "attempts", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: str
    due_ms: int
    attempts: int
    key: str
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[str] = ..., due_ms: _Optional[int] = ..., attempts: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class DeferMessageRequest(_message.Message):
    __slots__ = ("topic", "id", "receipt", "delay_ms", "reason", "rests_lane")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESTS_LANE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    receipt: str
    delay_ms: int
    reason: str
    rests_lane: bool
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ..., receipt: _Optional[str] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., rests_lane: bool = ...) -> None: ...

class DeferAnswer(_message.Message):
    __slots__ = ("id", "outcome", "due_ms", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: str
    due_ms: int
    key: str
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[str] = ..., due_ms: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class ExtendMessageRequest(_message.Message):
    __slots__ = ("topic", "id", "receipt", "ack_timeout_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    receipt: str
    ack_timeout_ms: int
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ..., receipt: _Optional[str] = ..., ack_timeout_ms: _Optional[int] = ...) -> None: ...

class ReleaseMessageRequest(_message.Message):
    __slots__ = ("topic", "id", "receipt")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    receipt: str
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ..., receipt: _Optional[str] = ...) -> None: ...

class HeldAnswer(_message.Message):
    __slots__ = ("id", "held", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    held: bool
    key: str
    def __init__(self, id: _Optional[str] = ..., held: bool = ..., key: _Optional[str] = ...) -> None: ...

class ReceiptRequest(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    def __init__(self, receipt: _Optional[str] = ...) -> None: ...

class RetryRequest(_message.Message):
    __slots__ = ("receipt", "delay_ms", "reason", "discard")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    delay_ms: int
    reason: str
    discard: bool
    def __init__(self, receipt: _Optional[str] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., discard: bool = ...) -> None: ...

class DeferRequest(_message.Message):
    __slots__ = ("receipt", "delay_ms", "reason", "rests_lane")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESTS_LANE_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    delay_ms: int
    reason: str
    rests_lane: bool
    def __init__(self, receipt: _Optional[str] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., rests_lane: bool = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("receipt", "ack_timeout_ms")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    ack_timeout_ms: int
    def __init__(self, receipt: _Optional[str] = ..., ack_timeout_ms: _Optional[int] = ...) -> None: ...

class AckMessagesRequest(_message.Message):
    __slots__ = ("topic", "deliveries")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    deliveries: _containers.RepeatedCompositeFieldContainer[ReceiptRequest]
    def __init__(self, topic: _Optional[str] = ..., deliveries: _Optional[_Iterable[_Union[ReceiptRequest, _Mapping]]] = ...) -> None: ...

class RetryMessagesRequest(_message.Message):
    __slots__ = ("topic", "deliveries")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    deliveries: _containers.RepeatedCompositeFieldContainer[RetryRequest]
    def __init__(self, topic: _Optional[str] = ..., deliveries: _Optional[_Iterable[_Union[RetryRequest, _Mapping]]] = ...) -> None: ...

class DeferMessagesRequest(_message.Message):
    __slots__ = ("topic", "deliveries")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    deliveries: _containers.RepeatedCompositeFieldContainer[DeferRequest]
    def __init__(self, topic: _Optional[str] = ..., deliveries: _Optional[_Iterable[_Union[DeferRequest, _Mapping]]] = ...) -> None: ...

class ExtendMessagesRequest(_message.Message):
    __slots__ = ("topic", "deliveries")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    deliveries: _containers.RepeatedCompositeFieldContainer[ExtendRequest]
    def __init__(self, topic: _Optional[str] = ..., deliveries: _Optional[_Iterable[_Union[ExtendRequest, _Mapping]]] = ...) -> None: ...

class ReleaseMessagesRequest(_message.Message):
    __slots__ = ("topic", "deliveries")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    deliveries: _containers.RepeatedCompositeFieldContainer[ReceiptRequest]
    def __init__(self, topic: _Optional[str] = ..., deliveries: _Optional[_Iterable[_Union[ReceiptRequest, _Mapping]]] = ...) -> None: ...

class SettledBatch(_message.Message):
    __slots__ = ("results", "succeeded", "failed")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SettledDelivery]
    succeeded: int
    failed: int
    def __init__(self, results: _Optional[_Iterable[_Union[SettledDelivery, _Mapping]]] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class SettledDelivery(_message.Message):
    __slots__ = ("id", "outcome", "due_ms", "attempts", "held", "problem", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: str
    due_ms: int
    attempts: int
    held: bool
    problem: Problem
    key: str
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[str] = ..., due_ms: _Optional[int] = ..., attempts: _Optional[int] = ..., held: bool = ..., problem: _Optional[_Union[Problem, _Mapping]] = ..., key: _Optional[str] = ...) -> None: ...

class ConsumeRequest(_message.Message):
    __slots__ = ("open", "credit", "started", "settlements")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SETTLEMENTS_FIELD_NUMBER: _ClassVar[int]
    open: Open
    credit: int
    started: _containers.RepeatedScalarFieldContainer[str]
    settlements: _containers.RepeatedCompositeFieldContainer[Settlement]
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., credit: _Optional[int] = ..., started: _Optional[_Iterable[str]] = ..., settlements: _Optional[_Iterable[_Union[Settlement, _Mapping]]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("topic", "group", "ack_timeout_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    ack_timeout_ms: int
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., ack_timeout_ms: _Optional[int] = ...) -> None: ...

class Settlement(_message.Message):
    __slots__ = ("receipt", "ack", "retry", "extend", "release", "defer")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DEFER_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    ack: Ack
    retry: Retry
    extend: Extend
    release: Release
    defer: Defer
    def __init__(self, receipt: _Optional[str] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., retry: _Optional[_Union[Retry, _Mapping]] = ..., extend: _Optional[_Union[Extend, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., defer: _Optional[_Union[Defer, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Retry(_message.Message):
    __slots__ = ("delay_ms", "reason", "discard")
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    delay_ms: int
    reason: str
    discard: bool
    def __init__(self, delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., discard: bool = ...) -> None: ...

class Defer(_message.Message):
    __slots__ = ("delay_ms", "reason", "rests_lane")
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESTS_LANE_FIELD_NUMBER: _ClassVar[int]
    delay_ms: int
    reason: str
    rests_lane: bool
    def __init__(self, delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., rests_lane: bool = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("ack_timeout_ms",)
    ACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ack_timeout_ms: int
    def __init__(self, ack_timeout_ms: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConsumeAnswer(_message.Message):
    __slots__ = ("deliveries", "settled", "closing")
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedCompositeFieldContainer[DeliveryAnswer]
    settled: _containers.RepeatedCompositeFieldContainer[Settled]
    closing: bool
    def __init__(self, deliveries: _Optional[_Iterable[_Union[DeliveryAnswer, _Mapping]]] = ..., settled: _Optional[_Iterable[_Union[Settled, _Mapping]]] = ..., closing: bool = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("receipt", "outcome", "due_ms", "problem")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    outcome: str
    due_ms: int
    problem: Problem
    def __init__(self, receipt: _Optional[str] = ..., outcome: _Optional[str] = ..., due_ms: _Optional[int] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ...) -> None: ...

class ListGarbageRequest(_message.Message):
    __slots__ = ("topic", "group", "reason", "died_before_ms", "cursor", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIED_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    reason: str
    died_before_ms: int
    cursor: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., reason: _Optional[str] = ..., died_before_ms: _Optional[int] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class GarbageRequest(_message.Message):
    __slots__ = ("topic", "ids", "all", "group", "reason", "died_before_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIED_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    group: str
    reason: str
    died_before_ms: int
    def __init__(self, topic: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ..., all: bool = ..., group: _Optional[str] = ..., reason: _Optional[str] = ..., died_before_ms: _Optional[int] = ...) -> None: ...

class GarbageAnswer(_message.Message):
    __slots__ = ("done", "missing")
    DONE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    done: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, done: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class ListSchedulesRequest(_message.Message):
    __slots__ = ("topic", "cursor")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    cursor: str
    def __init__(self, topic: _Optional[str] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListAllSchedulesRequest(_message.Message):
    __slots__ = ("cursor",)
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    def __init__(self, cursor: _Optional[str] = ...) -> None: ...

class NamedScheduleRequest(_message.Message):
    __slots__ = ("topic", "name")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class SetScheduleRequest(_message.Message):
    __slots__ = ("topic", "name", "body_json", "body_bytes", "cron", "every_ms", "tz", "dst", "start", "until", "count", "jitter_ms", "catch_up", "max_late_ms", "overlap", "template", "headers", "ttl_ms", "retry", "if_version", "late", "key", "cost", "slack_ms")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    JITTER_MS_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    MAX_LATE_MS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    IF_VERSION_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    SLACK_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    body_json: str
    body_bytes: bytes
    cron: str
    every_ms: int
    tz: str
    dst: str
    start: str
    until: str
    count: int
    jitter_ms: int
    catch_up: str
    max_late_ms: int
    overlap: str
    template: bool
    headers: _containers.ScalarMap[str, str]
    ttl_ms: int
    retry: str
    if_version: int
    late: str
    key: str
    cost: int
    slack_ms: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., body_json: _Optional[str] = ..., body_bytes: _Optional[bytes] = ..., cron: _Optional[str] = ..., every_ms: _Optional[int] = ..., tz: _Optional[str] = ..., dst: _Optional[str] = ..., start: _Optional[str] = ..., until: _Optional[str] = ..., count: _Optional[int] = ..., jitter_ms: _Optional[int] = ..., catch_up: _Optional[str] = ..., max_late_ms: _Optional[int] = ..., overlap: _Optional[str] = ..., template: bool = ..., headers: _Optional[_Mapping[str, str]] = ..., ttl_ms: _Optional[int] = ..., retry: _Optional[str] = ..., if_version: _Optional[int] = ..., late: _Optional[str] = ..., key: _Optional[str] = ..., cost: _Optional[int] = ..., slack_ms: _Optional[int] = ...) -> None: ...

class ScheduleChangedAnswer(_message.Message):
    __slots__ = ("name", "changed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    name: str
    changed: bool
    def __init__(self, name: _Optional[str] = ..., changed: bool = ...) -> None: ...

class ScheduleAnswer(_message.Message):
    __slots__ = ("name", "version", "paused", "next_ms", "last_ms", "created", "cron", "every_ms", "tz", "dst", "start_ms", "until_ms", "count", "jitter_ms", "catch_up", "max_caught_up", "max_late_ms", "overlap", "template", "headers", "ttl_ms", "retry", "body_json", "body_bytes", "late", "topic", "key", "cost", "slack_ms")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    JITTER_MS_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    MAX_CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    MAX_LATE_MS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    SLACK_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    paused: bool
    next_ms: int
    last_ms: int
    created: int
    cron: str
    every_ms: int
    tz: str
    dst: str
    start_ms: int
    until_ms: int
    count: int
    jitter_ms: int
    catch_up: str
    max_caught_up: int
    max_late_ms: int
    overlap: str
    template: bool
    headers: _containers.ScalarMap[str, str]
    ttl_ms: int
    retry: str
    body_json: str
    body_bytes: bytes
    late: str
    topic: str
    key: str
    cost: int
    slack_ms: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., paused: bool = ..., next_ms: _Optional[int] = ..., last_ms: _Optional[int] = ..., created: _Optional[int] = ..., cron: _Optional[str] = ..., every_ms: _Optional[int] = ..., tz: _Optional[str] = ..., dst: _Optional[str] = ..., start_ms: _Optional[int] = ..., until_ms: _Optional[int] = ..., count: _Optional[int] = ..., jitter_ms: _Optional[int] = ..., catch_up: _Optional[str] = ..., max_caught_up: _Optional[int] = ..., max_late_ms: _Optional[int] = ..., overlap: _Optional[str] = ..., template: bool = ..., headers: _Optional[_Mapping[str, str]] = ..., ttl_ms: _Optional[int] = ..., retry: _Optional[str] = ..., body_json: _Optional[str] = ..., body_bytes: _Optional[bytes] = ..., late: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ..., cost: _Optional[int] = ..., slack_ms: _Optional[int] = ...) -> None: ...

class SchedulesAnswer(_message.Message):
    __slots__ = ("schedules", "cursor")
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    schedules: _containers.RepeatedCompositeFieldContainer[ScheduleAnswer]
    cursor: str
    def __init__(self, schedules: _Optional[_Iterable[_Union[ScheduleAnswer, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class RunAnswer(_message.Message):
    __slots__ = ("name", "id", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    key: str
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class BackfillScheduleRequest(_message.Message):
    __slots__ = ("topic", "name", "from_ms", "to_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    from_ms: int
    to_ms: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ...) -> None: ...

class BackfillAnswer(_message.Message):
    __slots__ = ("name", "created", "known")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    name: str
    created: int
    known: int
    def __init__(self, name: _Optional[str] = ..., created: _Optional[int] = ..., known: _Optional[int] = ...) -> None: ...

class NextTicksRequest(_message.Message):
    __slots__ = ("topic", "name", "count")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    count: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class NextTicksAnswer(_message.Message):
    __slots__ = ("name", "ticks_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TICKS_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ticks_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., ticks_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class TopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("topic", "confirm")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    topic: str
    confirm: str
    def __init__(self, topic: _Optional[str] = ..., confirm: _Optional[str] = ...) -> None: ...

class DeletedAnswer(_message.Message):
    __slots__ = ("topic", "cancelled", "purged")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    cancelled: int
    purged: int
    def __init__(self, topic: _Optional[str] = ..., cancelled: _Optional[int] = ..., purged: _Optional[int] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ("cursor", "limit")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    limit: int
    def __init__(self, cursor: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class TopicsAnswer(_message.Message):
    __slots__ = ("topics", "cursor")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicCounts]
    cursor: str
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicCounts, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class TopicCounts(_message.Message):
    __slots__ = ("topic", "paused", "waiting", "ready", "in_flight", "retry", "garbage", "next_due_ms", "groups", "parked")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    paused: bool
    waiting: int
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_due_ms: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupAnswer]
    parked: int
    def __init__(self, topic: _Optional[str] = ..., paused: bool = ..., waiting: _Optional[int] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., retry: _Optional[int] = ..., garbage: _Optional[int] = ..., next_due_ms: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupAnswer, _Mapping]]] = ..., parked: _Optional[int] = ...) -> None: ...

class TopicAnswer(_message.Message):
    __slots__ = ("topic", "paused", "waiting", "ready", "in_flight", "retry", "garbage", "next_due_ms", "groups", "counters", "options", "parked")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    paused: bool
    waiting: int
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_due_ms: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupAnswer]
    counters: _containers.ScalarMap[str, int]
    options: _containers.ScalarMap[str, str]
    parked: int
    def __init__(self, topic: _Optional[str] = ..., paused: bool = ..., waiting: _Optional[int] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., retry: _Optional[int] = ..., garbage: _Optional[int] = ..., next_due_ms: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupAnswer, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., options: _Optional[_Mapping[str, str]] = ..., parked: _Optional[int] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("topic", "paused", "waiting", "ready", "in_flight", "retry", "garbage", "next_due_ms", "groups", "at_ms", "in_per_s", "out_per_s", "retried_per_s", "garbage_per_s", "lateness_p50_ms", "lateness_p99_ms", "parked")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_MS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    IN_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUT_PER_S_FIELD_NUMBER: _ClassVar[int]
    RETRIED_PER_S_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENESS_P50_MS_FIELD_NUMBER: _ClassVar[int]
    LATENESS_P99_MS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    paused: bool
    waiting: int
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_due_ms: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupAnswer]
    at_ms: int
    in_per_s: float
    out_per_s: float
    retried_per_s: float
    garbage_per_s: float
    lateness_p50_ms: float
    lateness_p99_ms: float
    parked: int
    def __init__(self, topic: _Optional[str] = ..., paused: bool = ..., waiting: _Optional[int] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., retry: _Optional[int] = ..., garbage: _Optional[int] = ..., next_due_ms: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupAnswer, _Mapping]]] = ..., at_ms: _Optional[int] = ..., in_per_s: _Optional[float] = ..., out_per_s: _Optional[float] = ..., retried_per_s: _Optional[float] = ..., garbage_per_s: _Optional[float] = ..., lateness_p50_ms: _Optional[float] = ..., lateness_p99_ms: _Optional[float] = ..., parked: _Optional[int] = ...) -> None: ...

class GroupAnswer(_message.Message):
    __slots__ = ("name", "ready", "in_flight", "retry", "garbage", "next_retry_ms", "parked")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_FIELD_NUMBER: _ClassVar[int]
    NEXT_RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_retry_ms: int
    parked: int
    def __init__(self, name: _Optional[str] = ..., ready: _Optional[int] = ..., in_flight: _Optional[int] = ..., retry: _Optional[int] = ..., garbage: _Optional[int] = ..., next_retry_ms: _Optional[int] = ..., parked: _Optional[int] = ...) -> None: ...

class OptionsAnswer(_message.Message):
    __slots__ = ("options",)
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.ScalarMap[str, str]
    def __init__(self, options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetOptionsRequest(_message.Message):
    __slots__ = ("topic", "group")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class SetOptionsRequest(_message.Message):
    __slots__ = ("topic", "options", "reset", "group")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    topic: str
    options: _containers.ScalarMap[str, str]
    reset: _containers.RepeatedScalarFieldContainer[str]
    group: str
    def __init__(self, topic: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ..., reset: _Optional[_Iterable[str]] = ..., group: _Optional[str] = ...) -> None: ...

class PausedAnswer(_message.Message):
    __slots__ = ("paused", "changed")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    changed: bool
    def __init__(self, paused: bool = ..., changed: bool = ...) -> None: ...

class GroupsAnswer(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupAnswer]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupAnswer, _Mapping]]] = ...) -> None: ...

class GroupRequest(_message.Message):
    __slots__ = ("topic", "group")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class DeclaredAnswer(_message.Message):
    __slots__ = ("group", "new")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    group: str
    new: bool
    def __init__(self, group: _Optional[str] = ..., new: bool = ...) -> None: ...

class RemovedAnswer(_message.Message):
    __slots__ = ("group", "settled")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    group: str
    settled: int
    def __init__(self, group: _Optional[str] = ..., settled: _Optional[int] = ...) -> None: ...

class PushTargets(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[PushTarget]
    def __init__(self, targets: _Optional[_Iterable[_Union[PushTarget, _Mapping]]] = ...) -> None: ...

class PushTarget(_message.Message):
    __slots__ = ("group", "url", "concurrency", "timeout_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    url: str
    concurrency: int
    timeout_ms: int
    def __init__(self, group: _Optional[str] = ..., url: _Optional[str] = ..., concurrency: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class SetPushTargetRequest(_message.Message):
    __slots__ = ("topic", "url", "group", "concurrency", "timeout_ms", "secret", "renew_secret")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    RENEW_SECRET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    url: str
    group: str
    concurrency: int
    timeout_ms: int
    secret: str
    renew_secret: bool
    def __init__(self, topic: _Optional[str] = ..., url: _Optional[str] = ..., group: _Optional[str] = ..., concurrency: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., secret: _Optional[str] = ..., renew_secret: bool = ...) -> None: ...

class PushAnswer(_message.Message):
    __slots__ = ("group", "url", "concurrency", "timeout_ms", "secret")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    group: str
    url: str
    concurrency: int
    timeout_ms: int
    secret: str
    def __init__(self, group: _Optional[str] = ..., url: _Optional[str] = ..., concurrency: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., secret: _Optional[str] = ...) -> None: ...

class RemovePushTargetRequest(_message.Message):
    __slots__ = ("topic", "group")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class PushRemoved(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, removed: _Optional[_Iterable[str]] = ...) -> None: ...

class ListConsumersRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class ConsumersAnswer(_message.Message):
    __slots__ = ("consumers",)
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    consumers: _containers.RepeatedCompositeFieldContainer[ConsumerAnswer]
    def __init__(self, consumers: _Optional[_Iterable[_Union[ConsumerAnswer, _Mapping]]] = ...) -> None: ...

class ConsumerAnswer(_message.Message):
    __slots__ = ("name", "topic", "group", "host", "pid", "started_ms", "seen_ms", "silent_ms", "alive", "concurrency", "running", "held", "handled", "state", "unknown", "error", "failing_ms", "busy_ms", "pushes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FAILING_MS_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    group: str
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
    unknown: bool
    error: str
    failing_ms: int
    busy_ms: int
    pushes: _containers.RepeatedCompositeFieldContainer[PushState]
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., group: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., started_ms: _Optional[int] = ..., seen_ms: _Optional[int] = ..., silent_ms: _Optional[int] = ..., alive: bool = ..., concurrency: _Optional[int] = ..., running: _Optional[int] = ..., held: _Optional[int] = ..., handled: _Optional[int] = ..., state: _Optional[str] = ..., unknown: bool = ..., error: _Optional[str] = ..., failing_ms: _Optional[int] = ..., busy_ms: _Optional[int] = ..., pushes: _Optional[_Iterable[_Union[PushState, _Mapping]]] = ...) -> None: ...

class PushState(_message.Message):
    __slots__ = ("group", "host", "state", "failed", "failing_ms", "error")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FAILING_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    group: str
    host: str
    state: str
    failed: int
    failing_ms: int
    error: str
    def __init__(self, group: _Optional[str] = ..., host: _Optional[str] = ..., state: _Optional[str] = ..., failed: _Optional[int] = ..., failing_ms: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class ListManagersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ManagersAnswer(_message.Message):
    __slots__ = ("managers",)
    MANAGERS_FIELD_NUMBER: _ClassVar[int]
    managers: _containers.RepeatedCompositeFieldContainer[ManagerAnswer]
    def __init__(self, managers: _Optional[_Iterable[_Union[ManagerAnswer, _Mapping]]] = ...) -> None: ...

class ManagerAnswer(_message.Message):
    __slots__ = ("name", "host", "pid", "started_ms", "seen_ms", "silent_ms", "alive", "topics", "unknown")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    name: str
    host: str
    pid: int
    started_ms: int
    seen_ms: int
    silent_ms: int
    alive: bool
    topics: int
    unknown: bool
    def __init__(self, name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., started_ms: _Optional[int] = ..., seen_ms: _Optional[int] = ..., silent_ms: _Optional[int] = ..., alive: bool = ..., topics: _Optional[int] = ..., unknown: bool = ...) -> None: ...
