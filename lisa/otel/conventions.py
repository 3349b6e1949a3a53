"""Names, attributes and metrics of OpenTelemetry's semantic conventions for messaging."""

from __future__ import annotations

from opentelemetry.metrics import Meter

SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
GROUP = "messaging.consumer.group.name"
MESSAGE_ID = "messaging.message.id"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
ATTEMPT = "messaging.lisa.message.delivery_attempt"
OUTCOME = "messaging.lisa.outcome"
DEFERRED = "deferred"

DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The bucket bounds that the conventions recommend."""

LATENESS_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60, 3600)

Attributes = dict[str, str | int]


def attributes_of(
    operation: str, kind: str, topic: str, group: str | None = None, error: str | None = None
) -> Attributes:
    """The attributes that spans and metrics of an operation share. `kind`: the operation type."""
    found: Attributes = {
        SYSTEM: "lisa",
        OPERATION_NAME: operation,
        OPERATION_TYPE: kind,
        DESTINATION: topic,
    }
    if group is not None:
        found[GROUP] = group
    if error is not None:
        found[ERROR_TYPE] = error
    return found


def error_type(error: BaseException) -> str:
    """The value of `error.type` for an exception."""
    return type(error).__qualname__


class Instruments:
    """The metric instruments."""

    def __init__(self, meter: Meter) -> None:
        self.sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that a producer tried to send."
        )
        self.consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            "{message}",
            "Messages that were delivered to handlers.",
        )
        self.operations = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of sends and settlements.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )
        self.handlers = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of handlers.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )
        self.lateness = meter.create_histogram(
            "lisa.message.lateness",
            "s",
            "Time from the due time to the start of the handler, at the first attempt.",
            explicit_bucket_boundaries_advisory=LATENESS_BOUNDS_S,
        )
