"""Every metric that Lisa exports: its name, kind, labels and meaning.

The reference page is made from this list, and a test holds it against what the roles export.
Names are those that one writes in PromQL, without `_bucket`, `_sum` and `_count` of histograms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lisa.core.lateness import BOUNDS_MS

__all__ = [
    "FAMILIES",
    "GROUP_COUNTERS",
    "OTHERS",
    "SECTIONS",
    "TOPIC_COUNTERS",
    "Family",
    "Section",
]

OTHERS = "(others)"
"""The label under which what is beyond the bounds is summed; no topic or group is called so."""

STEP_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
HANDLER_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    300.0, 1800.0,
)  # fmt: skip
LATENESS_SECONDS = tuple(bound / 1000 for bound in BOUNDS_MS)


class Family(NamedTuple):
    """One metric. `is_least`: of several processes the least value counts, not the sum."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    is_least: bool = False


class Section(NamedTuple):
    """Families that belong together, and which roles export them."""

    title: str
    roles: tuple[str, ...]
    families: tuple[Family, ...]


TOPIC_COUNTERS = {
    "sent": Family("lisa_topic_sent_total", "counter", "Messages accepted."),
    "duplicate": Family(
        "lisa_topic_duplicates_total", "counter",
        "Sends of an id that was live or remembered, and that changed nothing.",
    ),
    "promoted": Family(
        "lisa_topic_promoted_total", "counter", "Messages that fell due and were made ready."
    ),
    "expired": Family("lisa_topic_expired_total", "counter", "Messages ended past their ttl."),
    "cancelled": Family("lisa_topic_cancelled_total", "counter", "Messages cancelled."),
    "rescheduled": Family(
        "lisa_topic_rescheduled_total", "counter", "Messages given another due time."
    ),
    "restored": Family(
        "lisa_topic_restored_total", "counter", "Messages put back from an archive."
    ),
    "journaled": Family("lisa_topic_journaled_total", "counter", "Events written to the journal."),
    "journal_lost": Family(
        "lisa_topic_journal_lost_total", "counter",
        "Events that left the journal before every archive had taken them.",
    ),
    "journal_failed": Family(
        "lisa_topic_journal_failed_total", "counter", "Events that the journal could not take."
    ),
}  # fmt: skip
"""By their names in the topic's `stats`."""

GROUP_COUNTERS = {
    "acked": Family("lisa_topic_acked_total", "counter", "Messages handled and settled."),
    "acked_late": Family(
        "lisa_topic_acked_late_total", "counter",
        "Acks that came after the lease had ended, and still settled the message.",
    ),
    "stale": Family(
        "lisa_topic_stale_total", "counter",
        "Settlements that changed nothing: the delivery had been taken over.",
    ),
    "retried": Family(
        "lisa_topic_retried_total", "counter", "Failed attempts that will be repeated."
    ),
    "garbage": Family("lisa_topic_garbage_total", "counter", "Messages that went to garbage."),
    "reclaimed": Family(
        "lisa_topic_reclaimed_total", "counter", "Deliveries taken back after the ack timeout."
    ),
    "released": Family(
        "lisa_topic_released_total", "counter", "Deliveries given back, no attempt counted."
    ),
    "requeued": Family(
        "lisa_topic_requeued_total", "counter", "Messages taken out of garbage to be tried again."
    ),
    "purged": Family("lisa_topic_purged_total", "counter", "Messages deleted by an operator, by "
                     "age in garbage, or with their group."),
    "cleared": Family(
        "lisa_topic_cleared_total", "counter", "Stream entries removed whose message was gone."
    ),
    "trimmed": Family(
        "lisa_topic_trimmed_total", "counter", "Foreign stream entries removed."
    ),
}  # fmt: skip
"""By the part of their names before `@`."""

_BY_TOPIC, _BY_GROUP = ("topic",), ("topic", "group")


def _labelled(families: Sequence[Family], labels: tuple[str, ...]) -> tuple[Family, ...]:
    return tuple(family._replace(labels=labels) for family in families)


_TOPICS = (
    Family("lisa_topics", "gauge", "Topics that are registered."),
    Family(
        "lisa_topic_messages", "gauge",
        "Messages by state: waiting (no group), ready, in_flight, retry, garbage.",
        ("topic", "group", "state"),
    ),
    Family(
        "lisa_topic_backlog_messages", "gauge",
        "Messages that are due and not handed out: in waiting, ready and retry.", _BY_GROUP,
    ),
    Family(
        "lisa_topic_oldest_ready_seconds", "gauge",
        "For how long the next message to be handed out has been due; 0 if none is ready.",
        _BY_GROUP,
    ),
    Family(
        "lisa_topic_next_due_timestamp_seconds", "gauge",
        "When the next message of waiting or retry falls due; missing if there is none.", _BY_TOPIC,
    ),
    Family("lisa_topic_paused", "gauge", "1 while the topic is paused.", _BY_TOPIC),
    Family(
        "lisa_topic_capacity_messages", "gauge",
        "The topic option capacity; missing where there is no bound.", _BY_TOPIC,
    ),
    Family(
        "lisa_topic_max_ready_messages", "gauge",
        "The topic option max_ready: a group with so many unread messages is full.", _BY_TOPIC,
    ),
    Family(
        "lisa_topic_consumers_alive", "gauge",
        "Consumers that were heard of within 30 s; a gateway whose clients pull is one.", _BY_GROUP,
    ),
    Family(
        "lisa_topic_consumers_degraded", "gauge",
        "Those of them that take one message at a time after many failures.", _BY_GROUP,
    ),
    *_labelled(list(TOPIC_COUNTERS.values()), _BY_TOPIC),
    *_labelled(list(GROUP_COUNTERS.values()), _BY_GROUP),
    Family(
        "lisa_topic_lateness_seconds", "histogram",
        "First hand-over minus due, by Redis's clock, of acked and failed first attempts. Each "
        "counts in _sum with the middle of its bucket, above the last bound with that bound.",
        _BY_GROUP, LATENESS_SECONDS,
    ),
    Family(
        "lisa_topic_early_total", "counter",
        "Hand-overs before their due time: only a clock of Redis that was set back makes any.",
        _BY_GROUP,
    ),
)  # fmt: skip

_SERVER = (
    Family("lisa_managers_alive", "gauge", "Managers that were heard of within 30 s."),
    Family("lisa_server_memory_used_bytes", "gauge", "Memory that Redis uses."),
    Family(
        "lisa_server_memory_max_bytes", "gauge", "Redis's maxmemory; 0 if there is no bound."
    ),
    Family(
        "lisa_server_clock_offset_seconds", "gauge",
        "Redis's clock minus that of the machine which was asked.",
    ),
    Family(
        "lisa_reading_seconds", "gauge",
        "How long it took to read what Redis knows; a reading counts for 20 times as long, "
        "but for 1 s at least and 5 s at most.",
    ),
)  # fmt: skip

_ALL = (
    Family(
        "lisa_up", "gauge", "1 if Redis answers this role; else only its own metrics are there.",
        is_least=True,
    ),
    Family("lisa_build_info", "gauge", "Always 1.", ("version", "role"), is_least=True),
    Family("lisa_processes", "gauge", "Processes that the numbers are the sum of."),
    Family("lisa_process_cpu_seconds_total", "counter", "Processor time used."),
    Family(
        "lisa_process_resident_memory_bytes", "gauge", "Memory in use; missing where not Linux."
    ),
)  # fmt: skip

_MANAGER = (
    Family("lisa_manager_topics", "gauge", "Topics that this manager looks after."),
    Family(
        "lisa_manager_moved_total", "counter",
        "What this manager moved: promoted, reclaimed, expired, purged; and of entries in streams "
        "cleared, trimmed, mended.", ("kind",),
    ),
    Family(
        "lisa_manager_step_seconds", "histogram",
        "How long one step of a service took, round trips included.", ("service",), STEP_SECONDS,
    ),
    Family("lisa_manager_failures_total", "counter", "Steps that failed.", ("service",)),
    Family("lisa_manager_troubles", "gauge", "Topics that a service fails on now.", ("service",)),
    Family(
        "lisa_manager_overdue_seconds", "gauge",
        "For how long the earliest due topic has been waiting for a thread of the service.",
        ("service",),
    ),
    Family(
        "lisa_manager_unannounced_total", "counter",
        "Messages whose signals were not fired, because receivers are too slow.",
    ),
)  # fmt: skip

_CONSUMER = (
    Family("lisa_consumer_concurrency", "gauge", "Handlers that may run at a time."),
    Family("lisa_consumer_busy", "gauge", "Handlers that run now, all topics together."),
    Family("lisa_consumer_running", "gauge", "Messages that a handler works on.", _BY_GROUP),
    Family("lisa_consumer_held", "gauge", "Messages in hand, not settled yet.", _BY_GROUP),
    Family(
        "lisa_consumer_handled_total", "counter",
        "Messages that a handler finished with: ok, failed (to be tried again, or in garbage), "
        "discarded.",
        ("topic", "group", "outcome"),
    ),
    Family(
        "lisa_consumer_handler_seconds", "histogram",
        "How long handlers took; a message of a batch counts with its share.",
        _BY_GROUP, HANDLER_SECONDS,
    ),
    Family(
        "lisa_consumer_degraded", "gauge",
        "1 while the topic is taken one message at a time after many failures.", _BY_GROUP,
    ),
    Family("lisa_consumer_unreachable", "gauge", "1 while reading fails.", _BY_GROUP),
)  # fmt: skip

_GATEWAY = (
    Family(
        "lisa_gateway_requests_total", "counter",
        "Requests by face (native, camellia, mykit, delay-queue, page, metrics, health), method "
        "and status; 499 where the client left before the answer.",
        ("face", "method", "code"),
    ),
    Family(
        "lisa_gateway_request_seconds", "histogram",
        "How long requests took; those that wait for messages or stream events are left out.",
        ("face",), STEP_SECONDS,
    ),
    Family(
        "lisa_gateway_refused_total", "counter",
        "Requests answered 503: requests, bytes and waiting say which bound was met, server that "
        "Redis did not answer.",
        ("reason",),
    ),
    Family("lisa_gateway_requests_active", "gauge", "Requests at work, waiting ones included."),
    Family("lisa_gateway_pulls_waiting", "gauge", "Pulls that wait for a message."),
    Family("lisa_gateway_streams_open", "gauge", "Event streams that are followed."),
    Family("lisa_gateway_buffered_bytes", "gauge", "Requests and answers held in memory."),
    Family(
        "lisa_gateway_deliveries_total", "counter",
        "Deliveries handed_out, and those of them that were given_back since nobody took them.",
        ("outcome",),
    ),
    Family(
        "lisa_gateway_pushes_total", "counter",
        "Pushes by what the target made of them: done, later (it asked to wait), failed.",
        ("outcome",),
    ),
)  # fmt: skip

SECTIONS = (
    Section("Every role", ("manager", "consumer", "gateway"), _ALL),
    Section("Topics", ("manager", "gateway"), _TOPICS),
    Section("Server", ("manager", "gateway"), _SERVER),
    Section("Manager", ("manager",), _MANAGER),
    Section("Consumer", ("consumer",), _CONSUMER),
    Section("Gateway", ("gateway",), _GATEWAY),
)

FAMILIES = {family.name: family for section in SECTIONS for family in section.families}
