"""The table of operations: what the native API can do."""

from __future__ import annotations

from lisa.gateway.access import Scope
from lisa.gateway.native import (
    deliveries,
    garbage,
    messages,
    models,
    pushes,
    roles,
    sending,
    topics,
)
from lisa.gateway.native.events import Feeds
from lisa.gateway.native.operations import Operation, Problems

__all__ = ["operations"]

TOPIC = "/v1/topics/{topic}"
MESSAGES = f"{TOPIC}/messages"
MESSAGE = f"{MESSAGES}/{{id}}"

KNOWN = (
    "The id was known: `duplicate`, and the earlier message stays as it is, or `replaced`, and "
    "this one took its place."
)
NO_GROUP: Problems = {404: "The topic has no such group."}
NO_TOPIC: Problems = {404: "Nothing is known of the topic."}
REFUSED: Problems = {
    404: "Nothing is known of the message.",
    409: "It is in flight, or done; nothing was changed. `outcome` says which.",
}
STALE: Problems = {
    404: "Nothing is known of the message, or its group is no longer declared.",
    409: "The receipt is stale and nothing was changed: its lease had ended and was taken over, or "
    "it was settled. `state` says where the message stands.",
}


def operations() -> list[Operation]:
    """All of them, in the order in which they are shown."""
    return [
        *_sending(), *_messages(), *_deliveries(), *_garbage(), *_topics(), *pushes.operations(),
        *_roles(),
    ]  # fmt: skip


def _sending() -> list[Operation]:
    sent = models.SendAnswer
    return [
        Operation(
            name="sendMessage", method="POST", path=MESSAGES, group="Sending",
            summary="Send a message", scope=Scope.PRODUCE, handler=sending.send,
            body=models.SendRequest,
            answers={
                201: (sent, "Accepted."),
                200: (sent, KNOWN),
            },
            leads_to=("getMessage", "cancelMessage", "rescheduleMessage", "fireMessage"),
            problems={
                409: "The id was known, and `on_duplicate` is `reject`.",
                429: "The topic is full: its option `capacity`.",
            },
        ),
        Operation(
            name="sendMessages", method="POST", path=f"{TOPIC}/messages:batch", group="Sending",
            summary="Send many messages", scope=Scope.PRODUCE, handler=sending.send_batch,
            description="At most 1,000. Each has its own result, in the order given: one that is "
            "at fault has a problem and is not sent, the others are. If the server is away and "
            "nothing was sent, the whole is answered 503.",
            body=models.BatchRequest,
            answers={200: (models.BatchAnswer, "The result of each, also where some failed.")},
        ),
    ]  # fmt: skip


def _messages() -> list[Operation]:
    moved = models.RescheduleAnswer
    return [
        Operation(
            name="listMessages", method="GET", path=MESSAGES, group="Messages",
            summary="List messages in one state", handler=messages.list_, query=models.ListQuery,
            description="By due time; ready and in flight in the order of delivery.",
            answers={200: (models.MessagesAnswer, "A page.")}, problems=NO_GROUP,
        ),
        Operation(
            name="getMessage", method="GET", path=MESSAGE, group="Messages",
            summary="Look at a message", handler=messages.get,
            description="A settled one is known for the topic's `retention`.",
            answers={200: (models.MessageAnswer, "The message as it stands.")},
            problems={404: REFUSED[404]},
        ),
        Operation(
            name="cancelMessage", method="DELETE", path=MESSAGE, group="Messages",
            summary="Cancel a message", scope=Scope.PRODUCE, handler=messages.cancel,
            answers={200: (models.CancelAnswer, "It will not be handled.")}, problems=REFUSED,
        ),
        Operation(
            name="rescheduleMessage", method="PATCH", path=MESSAGE, group="Messages",
            summary="Give a message a new due time", scope=Scope.PRODUCE,
            handler=messages.reschedule, body=models.RescheduleRequest,
            answers={200: (moved, "Moved.")}, problems=REFUSED,
        ),
        Operation(
            name="fireMessage", method="POST", path=f"{MESSAGE}/fire", group="Messages",
            summary="Make a message due now", scope=Scope.PRODUCE, handler=messages.fire,
            answers={200: (moved, "It is due.")}, problems=REFUSED,
        ),
    ]  # fmt: skip


def _deliveries() -> list[Operation]:
    receipt, held = models.ReceiptRequest, models.HeldAnswer
    return [
        Operation(
            name="pull", method="POST", path=f"{TOPIC}/pull", group="Deliveries",
            summary="Take messages that are due", scope=Scope.CONSUME, handler=deliveries.pull,
            description="Waits up to `wait_ms` for the first. A client that goes away costs a "
            "message no attempt. Settle each delivery with its receipt, at any gateway.",
            body=models.PullRequest, is_body_optional=True,
            answers={200: (models.PullAnswer, "Deliveries, or none.")}, problems=NO_GROUP,
        ),
        Operation(
            name="ackMessage", method="POST", path=f"{MESSAGE}/ack", group="Deliveries",
            summary="Say that a delivery was handled", scope=Scope.CONSUME,
            handler=deliveries.ack, body=receipt,
            answers={200: (models.AckAnswer, "Settled.")}, problems=STALE,
        ),
        Operation(
            name="retryMessage", method="POST", path=f"{MESSAGE}/retry", group="Deliveries",
            summary="Say that a delivery failed", scope=Scope.CONSUME,
            handler=deliveries.retry, body=models.RetryRequest,
            answers={200: (models.RetryAnswer, "It is tried again, or is in garbage.")},
            problems=STALE,
        ),
        Operation(
            name="extendMessage", method="POST", path=f"{MESSAGE}/extend", group="Deliveries",
            summary="Keep a delivery for longer", scope=Scope.CONSUME,
            handler=deliveries.extend, body=models.ExtendRequest,
            answers={200: (held, "Its ack timeout begins anew.")}, problems=STALE,
        ),
        Operation(
            name="releaseMessage", method="POST", path=f"{MESSAGE}/release", group="Deliveries",
            summary="Give a delivery back", scope=Scope.CONSUME, handler=deliveries.release,
            description="It goes to the next at once; no attempt is counted.", body=receipt,
            answers={200: (held, "Given back.")}, problems=STALE,
        ),
    ]  # fmt: skip


def _garbage() -> list[Operation]:
    wanted, done = models.GarbageRequest, models.GarbageAnswer
    return [
        Operation(
            name="listGarbage", method="GET", path=f"{TOPIC}/garbage", group="Garbage",
            summary="List dead messages", handler=garbage.list_, query=models.GarbageQuery,
            answers={200: (models.MessagesAnswer, "A page, the oldest first.")}, problems=NO_GROUP,
        ),
        Operation(
            name="requeueGarbage", method="POST", path=f"{TOPIC}/garbage:requeue", group="Garbage",
            summary="Give dead messages a new life", scope=Scope.OPERATE, handler=garbage.requeue,
            body=wanted, answers={200: (done, "They are due now.")}, problems=NO_GROUP,
        ),
        Operation(
            name="purgeGarbage", method="POST", path=f"{TOPIC}/garbage:purge", group="Garbage",
            summary="End dead messages for good", scope=Scope.OPERATE, handler=garbage.purge,
            body=wanted, answers={200: (done, "They are gone.")}, problems=NO_GROUP,
        ),
    ]  # fmt: skip


def _topics() -> list[Operation]:
    options, paused = models.OptionsAnswer, models.PausedAnswer
    return [
        Operation(
            name="listTopics", method="GET", path="/v1/topics", group="Topics",
            summary="List topics", handler=topics.list_, query=models.TopicsQuery,
            answers={200: (models.TopicsAnswer, "A page of those that the token may see.")},
        ),
        Operation(
            name="getTopic", method="GET", path=TOPIC, group="Topics",
            summary="Look at a topic", handler=topics.get,
            answers={200: (models.TopicAnswer, "Counts, counters, options.")}, problems=NO_TOPIC,
        ),
        Operation(
            name="watchTopic", method="GET", path=f"{TOPIC}/events", group="Topics",
            summary="Watch a topic", handler=Feeds().stream, media_type="text/event-stream",
            description="Server-sent events named `counts`, each with an Activity as its data: "
            "the first at once, then one each second in which anything changed.",
            answers={200: (models.Activity, "A stream; it ends when the gateway stops.")},
        ),
        Operation(
            name="getOptions", method="GET", path=f"{TOPIC}/options", group="Topics",
            summary="Look at a topic's options", handler=topics.get_options,
            answers={200: (options, "All of them; the default where nothing was set.")},
        ),
        Operation(
            name="setOptions", method="PATCH", path=f"{TOPIC}/options", group="Topics",
            summary="Set a topic's options", scope=Scope.OPERATE, handler=topics.set_options,
            body=models.OptionsRequest, answers={200: (options, "All of them, as they are now.")},
        ),
        Operation(
            name="pauseTopic", method="POST", path=f"{TOPIC}/pause", group="Topics",
            summary="Pause a topic", scope=Scope.OPERATE, handler=topics.pause,
            description="Nothing is promoted, read or pulled; what is in flight finishes.",
            answers={200: (paused, "It is paused.")},
        ),
        Operation(
            name="resumeTopic", method="POST", path=f"{TOPIC}/resume", group="Topics",
            summary="Resume a topic", scope=Scope.OPERATE, handler=topics.resume,
            answers={200: (paused, "It runs.")},
        ),
        *_groups(),
    ]  # fmt: skip


def _groups() -> list[Operation]:
    declared = models.DeclaredAnswer
    return [
        Operation(
            name="listGroups", method="GET", path=f"{TOPIC}/groups", group="Topics",
            summary="List a topic's groups", handler=topics.list_groups,
            answers={200: (models.GroupsAnswer, "The groups and their counts.")},
            problems=NO_TOPIC,
        ),
        Operation(
            name="addGroup", method="POST", path=f"{TOPIC}/groups", group="Topics",
            summary="Declare a group", scope=Scope.OPERATE, handler=topics.add_group,
            description="It gets what is promoted from now on.", body=models.GroupRequest,
            answers={201: (declared, "It is new."), 200: (declared, "It was declared before.")},
        ),
        Operation(
            name="removeGroup", method="DELETE", path=f"{TOPIC}/groups/{{group}}", group="Topics",
            summary="Remove a group", scope=Scope.OPERATE, handler=topics.remove_group,
            description="What it owed is settled; messages that other groups owe stay theirs.",
            answers={200: (models.RemovedAnswer, "It is gone.")}, problems=NO_GROUP,
        ),
    ]  # fmt: skip


def _roles() -> list[Operation]:
    return [
        Operation(
            name="listConsumers", method="GET", path="/v1/consumers", group="Roles",
            summary="List consumers", handler=roles.consumers, query=models.RolesQuery,
            answers={200: (models.ConsumersAnswer, "Those of topics that the token may see.")},
        ),
        Operation(
            name="listManagers", method="GET", path="/v1/managers", group="Roles",
            summary="List managers", handler=roles.managers,
            answers={200: (models.ManagersAnswer, "All of them.")},
        ),
    ]  # fmt: skip
