"""What the native API takes and answers, as types; the OpenAPI document's schemas come from here.

In requests `null` is as good as leaving a field out, except for `body`, where it is a value.
"""

from __future__ import annotations

from lisa.gateway.native.models.base import NoFields, Problem
from lisa.gateway.native.models.deliveries import (
    AckAnswer,
    DeliveryAnswer,
    ExtendRequest,
    HeldAnswer,
    PullAnswer,
    PullRequest,
    ReceiptRequest,
    RetryAnswer,
    RetryRequest,
)
from lisa.gateway.native.models.garbage import GarbageAnswer, GarbageQuery, GarbageRequest
from lisa.gateway.native.models.messages import (
    CancelAnswer,
    ListedMessage,
    ListQuery,
    MessageAnswer,
    MessagesAnswer,
    PlaceAnswer,
    RescheduleAnswer,
    RescheduleRequest,
)
from lisa.gateway.native.models.roles import (
    ConsumerAnswer,
    ConsumersAnswer,
    ManagerAnswer,
    ManagersAnswer,
    RolesQuery,
)
from lisa.gateway.native.models.sending import (
    BatchAnswer,
    BatchRequest,
    BatchResult,
    SendAnswer,
    SendRequest,
)
from lisa.gateway.native.models.topics import (
    Activity,
    DeclaredAnswer,
    GroupAnswer,
    GroupRequest,
    GroupsAnswer,
    OptionsAnswer,
    OptionsRequest,
    PausedAnswer,
    RemovedAnswer,
    TopicAnswer,
    TopicCounts,
    TopicsAnswer,
    TopicsQuery,
)

__all__ = [
    "AckAnswer", "Activity", "BatchAnswer", "BatchRequest", "BatchResult", "CancelAnswer",
    "ConsumerAnswer", "ConsumersAnswer", "DeclaredAnswer", "DeliveryAnswer", "ExtendRequest",
    "GarbageAnswer", "GarbageQuery", "GarbageRequest", "GroupAnswer", "GroupRequest",
    "GroupsAnswer", "HeldAnswer", "ListQuery", "ListedMessage", "ManagerAnswer",
    "ManagersAnswer", "MessageAnswer", "MessagesAnswer", "NoFields", "OptionsAnswer",
    "OptionsRequest", "PausedAnswer", "PlaceAnswer", "Problem", "PullAnswer", "PullRequest",
    "ReceiptRequest", "RemovedAnswer", "RescheduleAnswer", "RescheduleRequest", "RetryAnswer",
    "RetryRequest", "RolesQuery", "SendAnswer", "SendRequest", "TopicAnswer", "TopicCounts",
    "TopicsAnswer", "TopicsQuery",
]  # fmt: skip
