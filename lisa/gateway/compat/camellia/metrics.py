"""Metrics with the original's Prometheus names, on a separate path; `/metrics` has Lisa's own.

JVM metrics are omitted: `memory_info`, `gc`, and the labels `vm_vendor`, `vm_name`, `vm_version`,
`jvm_info` and `java_version` of `info`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence

import msgspec

import lisa
from lisa.gateway.compat.camellia.monitor import MonitorData, TimeGapStats
from lisa.gateway.compat.camellia.topics import BANDS, TopicInfo

Sample = tuple[dict[str, str], float | int]

_started_ms = time.time_ns() // 1_000_000
_started = time.monotonic()


def exposition(
    prefix: str, data: MonitorData, topics: Sequence[TopicInfo], cpu_usage: float
) -> str:
    """All metrics in Prometheus's text format."""
    uptime_ms = round(1000 * (time.monotonic() - _started))
    families: list[tuple[str, str, list[Sample]]] = [
        ("info", "Info", [(_info(), 1)]),
        ("uptime", "Uptime", [({}, uptime_ms)]),
        ("start_time", "StartTime", [({}, _started_ms)]),
        (
            "cpu",
            "Cpu",
            [({"type": "cpu_num"}, os.cpu_count() or 1), ({"type": "usage"}, round(cpu_usage, 6))],
        ),
        ("request", "Request", list(_requests(data))),
        ("pull_msg_time_gap", "Pull Msg Time Gap", list(_gaps(data.pull_msg_time_gap_stats_list))),
        (
            "ready_queue_time_gap",
            "Ready Queue Time Gap",
            list(_gaps(data.ready_queue_time_gap_stats_list)),
        ),
        ("topic_info", "Topic Info", list(_topics(topics))),
    ]
    lines = []
    for name, about, samples in families:
        full = prefix + name
        lines += [f"# HELP {full} Delay Queue {about}", f"# TYPE {full} gauge"]
        lines += [f"{full}{_labels(labels)} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _info() -> dict[str, str]:
    return {
        "camellia_version": f"lisa-{lisa.__version__}",
        "arch": platform.machine(),
        "os_name": platform.system(),
        "os_version": platform.release(),
        "system_load_average": str(os.getloadavg()[0]),
    }


def _requests(data: MonitorData) -> Iterator[Sample]:
    for stats in data.request_stats_list:
        counts = msgspec.to_builtins(stats)
        topic = counts.pop("topic")
        for name, value in counts.items():
            yield {"topic": topic, "type": name}, value


def _gaps(stats: Sequence[TimeGapStats]) -> Iterator[Sample]:
    for one in stats:
        for name, value in (("count", one.count), ("avg", one.avg), ("max", one.max)):
            yield {"topic": one.topic, "type": name}, value


def _topics(topics: Sequence[TopicInfo]) -> Iterator[Sample]:
    for one in topics:
        sizes = [
            ("readyQueueSize", one.ready_queue_size),
            ("ackQueueSize", one.ack_queue_size),
            ("waitingQueueSize", one.waiting_queue_size),
            *zip(BANDS, one.waiting_queue_info.values(), strict=True),
        ]
        for name, value in sizes:
            yield {"topic": one.topic, "type": name}, value


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
