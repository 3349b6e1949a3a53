"""Every metric that Lisa exports: name, kind, labels and help text.

The reference page is generated from this list, and a test compares it with what the roles export.
Names are those used in PromQL, without `_bucket`, `_sum` and `_count` of histograms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from lisa.core.model.lateness import BOUNDS_MS

OTHERS = "(others)"
"""Label for the sum of topics or groups beyond the limits; not a valid topic or group name."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_SECONDS = (0.0005, *_SECONDS)
HANDLER_SECONDS = (*_SECONDS, 60.0, 300.0, 1800.0)
LATENESS_SECONDS = tuple(bound / 1000 for bound in BOUNDS_MS)


class Family(NamedTuple):
    """One metric. `is_least`: combine processes by the minimum instead of the sum."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    is_least: bool = False


class MetricSection(NamedTuple):
    """A set of related families, and the roles that export them."""

    title: str
    roles: tuple[str, ...]
    families: tuple[Family, ...]


_BY_TOPIC, _BY_GROUP, _BY_ARCHIVE = ("topic",), ("topic", "group"), ("topic", "archive")


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(name, "gauge", text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(name, "counter", text, labels)


def _counters(labels: tuple[str, ...], texts: Mapping[str, str]) -> dict[str, Family]:
    """The counters in a topic's `stats`, by their names there."""
    names = {stat: stat for stat in texts} | {"duplicate": "duplicates"}
    return {
        stat: _counter(f"lisa_topic_{names[stat]}_total", text, labels)
        for stat, text in texts.items()
    }


TOPIC_COUNTERS = _counters(
    _BY_TOPIC,
    {
        "sent": "Messages accepted.",
        "duplicate": "Sends of a known id, live or remembered, that changed nothing.",
        "promoted": "Due messages moved to ready.",
        "expired": "Messages that exceeded their ttl.",
        "skipped": "Messages that a late policy skipped at their first promotion.",
        "cancelled": "Messages cancelled.",
        "rescheduled": "Messages whose due time was changed.",
        "overlapped": "Ticks of schedules that an unfinished occurrence prevented or delayed.",
        "restored": "Messages restored from an archive.",
        "unknown_zones": "Deliveries whose window takes the zone from a header that names none.",
        "pauses": "Times the topic was paused; each shard counts.",
        "resumes": "Times the topic was resumed; each shard counts.",
        "journaled": "Events written to the journal.",
        "journal_lost": "Events removed from the journal before every archive had read them.",
        "journal_failed": "Events that could not be journaled.",
    },
)
"""Keyed by the counter's name in the topic's `stats`."""

GROUP_COUNTERS = _counters(
    _BY_GROUP,
    {
        "acked": "Messages handled and settled.",
        "acked_late": "Acks after the end of the lease that still settled the message.",
        "stale": "Settlements without effect: the lease had ended, or it was settled before.",
        "retried": "Failed attempts that will be repeated.",
        "garbage": "Messages moved to garbage.",
        "reclaimed": "Deliveries reclaimed after the ack timeout.",
        "released": "Deliveries returned without counting an attempt.",
        "deferred": "Deliveries put off without counting an attempt: by a handler or a client, or "
        "because they were outside their window.",
        "requeued": "Messages moved from garbage back to retry.",
        "purged": "Messages deleted from garbage by an operator or by age, or removed with their "
        "group.",
        "cleared": "Stream entries removed because of a missing message.",
        "trimmed": "Foreign stream entries removed.",
    },
)
"""Keyed by the part of the counter's name before `@`."""

_TOPICS = (
    _gauge("lisa_topics", "Registered topics."),
    _gauge(
        "lisa_topic_messages",
        "Messages by state: waiting (no group), ready, in_flight, parked, retry, garbage.",
        ("topic", "group", "state"),
    ),
    _gauge(
        "lisa_topic_backlog_messages",
        "Due messages not yet delivered: in waiting, parked, ready and retry.",
        _BY_GROUP,
    ),
    _gauge(
        "lisa_topic_lanes",
        "Lanes with parked messages, by what they wait for: their turn, or the instant at which a "
        "rate or a rest lets them through. Lanes without a free slot are in neither.",
        ("topic", "group", "waits_for"),
    ),
    _gauge(
        "lisa_topic_oldest_ready_seconds",
        "How long the next message to deliver has been due; 0 if none is ready.",
        _BY_GROUP,
    ),
    _gauge(
        "lisa_topic_next_due_timestamp_seconds",
        "Due time of the next message in waiting or retry; absent if there is none.",
        _BY_TOPIC,
    ),
    _gauge("lisa_topic_paused", "1 while the topic is paused.", _BY_TOPIC),
    _gauge(
        "lisa_topic_capacity_messages", "The topic option capacity; absent if unlimited.", _BY_TOPIC
    ),
    _gauge(
        "lisa_topic_max_ready_messages",
        "The topic option max_ready: a group with this many unread messages is full.",
        _BY_TOPIC,
    ),
    _gauge(
        "lisa_topic_ramp_messages",
        "Messages of the backlog that the topic option ramp holds back; absent without a ramp.",
        _BY_TOPIC,
    ),
    _gauge(
        "lisa_topic_ramp_seconds",
        "How long the promotion of that backlog takes at the ramp's rate.",
        _BY_TOPIC,
    ),
    _gauge(
        "lisa_topic_consumers_alive",
        "Processes with a consumer of the group that was seen within 30 s; a gateway whose clients "
        "pull, or that pushes, counts as one.",
        _BY_GROUP,
    ),
    _gauge(
        "lisa_topic_consumers_degraded",
        "Consumers that take one message at a time after many failures.",
        _BY_GROUP,
    ),
    _gauge(
        "lisa_topic_archive_behind_events",
        "Events of the journal that the archive has not stored yet.",
        _BY_ARCHIVE,
    ),
    _gauge(
        "lisa_topic_archive_behind_seconds",
        "Age of the oldest event of the journal that the archive has not stored yet; 0 if it has "
        "stored all.",
        _BY_ARCHIVE,
    ),
    *TOPIC_COUNTERS.values(),
    *GROUP_COUNTERS.values(),
    Family(
        "lisa_topic_lateness_seconds",
        "histogram",
        "Time of first delivery minus due time, by Redis's clock, of acked and failed first "
        "attempts. _sum counts each with the middle of its bucket, or the last bound if above it.",
        _BY_GROUP,
        LATENESS_SECONDS,
    ),
    _gauge(
        "lisa_topic_lateness_max_seconds",
        "The highest lateness that was counted since the topic exists; absent if at most 1 s.",
        _BY_GROUP,
    ),
    _counter(
        "lisa_topic_early_total",
        "Deliveries before their due time; possible only if Redis's clock was set back.",
        _BY_GROUP,
    ),
)

_SERVER = (
    _gauge(
        "lisa_server_refuses_writes",
        "1 if Redis, or a primary of the cluster, refuses writes; otherwise 0. Roles cannot renew "
        "their heartbeats meanwhile, so the numbers of roles alive are too low.",
    ),
    _gauge("lisa_managers_alive", "Managers seen within 30 s."),
    _gauge(
        "lisa_consumers_alive",
        "Processes with a consumer of any topic that was seen within 30 s, including gateways. One "
        "that reads several topics counts once here, and once for each in "
        "lisa_topic_consumers_alive.",
    ),
    _gauge(
        "lisa_loader_last_success_timestamp_seconds",
        "When the last successful run of a job with --due-within began; before any, the first run.",
        ("loader",),
    ),
    _gauge("lisa_loader_horizon_seconds", "How far ahead that run loaded rows.", ("loader",)),
    _gauge(
        "lisa_server_memory_used_bytes",
        "Memory that Redis uses; on a cluster, that of the fullest primary.",
    ),
    _gauge(
        "lisa_server_memory_max_bytes",
        "Redis's maxmemory, 0 if unlimited; on a cluster, that of the fullest primary.",
    ),
    _gauge(
        "lisa_server_clock_offset_seconds", "Redis's clock minus the clock of the scraped machine."
    ),
    _gauge(
        "lisa_reading_seconds",
        "How long the last reading of Redis took; a reading is valid for 20 times as long, "
        "but for at least 1 s and at most 5 s.",
    ),
)

_ALL = (
    Family(
        "lisa_up",
        "gauge",
        "1 if Redis answers this role; otherwise only the role's own metrics are present.",
        is_least=True,
    ),
    Family("lisa_build_info", "gauge", "Always 1.", ("version", "role"), is_least=True),
    _gauge("lisa_processes", "Number of processes included in the sums."),
    _counter("lisa_process_cpu_seconds_total", "Processor time used."),
    _counter(
        "lisa_process_unforeseen_errors_total",
        "Unexpected exceptions in threads and tasks, logged with a traceback and survived.",
    ),
    _counter(
        "lisa_process_log_lines_dropped_total",
        "Log lines dropped because the reader of the log was too slow.",
    ),
    _gauge("lisa_process_resident_memory_bytes", "Resident memory; Linux only."),
)

_MANAGER = (
    _gauge("lisa_manager_topics", "Topics handled by this manager."),
    _counter(
        "lisa_manager_moved_total",
        "Messages that this manager promoted, reclaimed, expired, skipped as too late (or moved "
        "to garbage for it), purged, or created for schedules, and stream entries that it "
        "cleared, trimmed or mended.",
        ("kind",),
    ),
    Family(
        "lisa_manager_step_seconds",
        "histogram",
        "Duration of one step of a service, including round trips.",
        ("service",),
        STEP_SECONDS,
    ),
    _counter("lisa_manager_failures_total", "Steps that failed.", ("service",)),
    _gauge("lisa_manager_troubles", "Topics that a service currently fails on.", ("service",)),
    _gauge(
        "lisa_manager_overdue_seconds",
        "How long the most overdue topic has waited for a thread of the service.",
        ("service",),
    ),
    _counter(
        "lisa_manager_unannounced_total",
        "Messages whose signals were not fired because receivers were too slow.",
    ),
)

_RELAY = (
    _gauge(
        "lisa_relay_backlog_rows",
        "Rows of the outbox that wait, without those set aside; relays of one table report the "
        "same.",
    ),
    _gauge("lisa_relay_oldest_seconds", "Age of the oldest of these rows; 0 if there is none."),
    _gauge(
        "lisa_relay_set_aside_rows",
        "Rows that can never be sent, and the later operations on the same messages.",
    ),
    _counter(
        "lisa_relay_operations_total",
        "Operations send, cancel and reschedule by result: forwarded, postponed, set_aside.",
        ("operation", "result"),
    ),
    _counter("lisa_relay_errors_total", "Rounds that failed: Redis or the database."),
    Family(
        "lisa_relay_step_seconds",
        "histogram",
        "Duration of the forwarding of one batch, including its transaction.",
        (),
        STEP_SECONDS,
    ),
)

_CONSUMER = (
    _gauge("lisa_consumer_concurrency", "Maximum number of handlers running in parallel."),
    _gauge("lisa_consumer_busy", "Running handlers, over all topics."),
    _gauge("lisa_consumer_running", "Messages being handled.", _BY_GROUP),
    _gauge("lisa_consumer_held", "Messages held and not yet settled.", _BY_GROUP),
    _counter(
        "lisa_consumer_handled_total",
        "Messages whose handler finished: ok, failed (to be retried, or in garbage), discarded, "
        "deferred.",
        ("topic", "group", "outcome"),
    ),
    Family(
        "lisa_consumer_handler_seconds",
        "histogram",
        "Duration of handlers; each message of a batch counts with its share.",
        _BY_GROUP,
        HANDLER_SECONDS,
    ),
    _gauge(
        "lisa_consumer_degraded",
        "1 while the consumer takes one message at a time after many failures.",
        _BY_GROUP,
    ),
    _gauge("lisa_consumer_unreachable", "1 while reading fails.", _BY_GROUP),
)

_GATEWAY = (
    _counter(
        "lisa_gateway_requests_total",
        "Requests by face (native, grpc, camellia, mykit, delay-queue, page, metrics, health), "
        "method and status; 499 if the client disconnected before the answer.",
        ("face", "method", "code"),
    ),
    Family(
        "lisa_gateway_request_seconds",
        "histogram",
        "Duration of requests, except those that wait for messages or stream events.",
        ("face",),
        STEP_SECONDS,
    ),
    _counter(
        "lisa_gateway_refused_total",
        "Requests answered with 503: requests, bytes and waiting name the limit reached, server "
        "means that Redis did not answer.",
        ("reason",),
    ),
    _counter("lisa_gateway_malformed_total", "Requests answered with 400: not valid HTTP."),
    _gauge("lisa_gateway_requests_active", "Requests in progress, including waiting ones."),
    _gauge("lisa_gateway_requests_stalled", "Responses that wait until their client reads."),
    _gauge("lisa_gateway_pulls_waiting", "Pulls waiting for a message."),
    _gauge("lisa_gateway_streams_open", "Open event streams."),
    _gauge("lisa_gateway_buffered_bytes", "Bytes of requests and answers in memory."),
    _counter(
        "lisa_gateway_deliveries_total",
        "Deliveries handed_out, and how many were given_back because no client took them.",
        ("outcome",),
    ),
    _counter(
        "lisa_gateway_pushes_total",
        "Pushes by topic and outcome: done, later (the target asked to wait), failed, fault (of "
        "the gateway itself, for which no message is charged).",
        ("topic", "outcome"),
    ),
)

SECTIONS = (
    MetricSection("Every role", ("manager", "consumer", "gateway", "relay"), _ALL),
    MetricSection("Topics", ("manager", "gateway"), _TOPICS),
    MetricSection("Server", ("manager", "gateway"), _SERVER),
    MetricSection("Manager", ("manager",), _MANAGER),
    MetricSection("Consumer", ("consumer",), _CONSUMER),
    MetricSection("Gateway", ("gateway",), _GATEWAY),
    MetricSection("Relay", ("relay", "manager with a relay"), _RELAY),
)

FAMILIES = {family.name: family for section in SECTIONS for family in section.families}
