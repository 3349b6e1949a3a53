"""The options of `spark.readStream.format("lisa")`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_topic
from lisa.pipeline.server import Server
from lisa.pipeline.source import options

_NAMES = options.SERVER | {
    "topic",
    "starting",
    "max_events_per_batch",
    "partitions",
    "fail_on_gap",
    "archive",
    "report_progress",
}
_MAX_EVENTS = 500_000


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """The parsed options of a stream.

    topics: one or several, separated by commas; default: all topics with a journal, including new
        ones.
    from_earliest: start at the first event (`starting` = earliest) or after the last (latest).
    partitions: maximum number of tasks of a batch; None to derive it from the number of events.
    archive: the name under which this reader reports its progress to the journal.
    report_progress: whether it reports each batch that Spark has committed; the job `archive`
        reports what the archive contains instead.
    """

    server: Server
    topics: tuple[str, ...]
    from_earliest: bool
    max_events: int
    partitions: int | None
    fail_on_gap: bool
    archive: str | None
    report_progress: bool

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Raises ConfigError for an invalid or unknown option."""
        options.refuse_unknown(given, _NAMES, "readStream")
        starting = options.choice(given, "starting", ("earliest", "latest"), "earliest")
        return cls(
            server=Server.of(given.get("url"), given.get("prefix")),
            topics=tuple(map(check_topic, options.listed(given.get("topic", "")))),
            from_earliest=starting == "earliest",
            max_events=options.whole_number(given, "max_events_per_batch") or _MAX_EVENTS,
            partitions=options.whole_number(given, "partitions"),
            fail_on_gap=options.flag(given, "fail_on_gap", default=True),
            archive=_archive_name(given),
            report_progress=options.flag(given, "report_progress", default=True),
        )


def _archive_name(given: Mapping[str, str]) -> str | None:
    name = given.get("archive", "").strip()
    if not name:
        return None
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ConfigError(
            f"archive {name!r} is not allowed: use 1 to 64 of the characters A-Z a-z 0-9 _ . -"
        )
    return name
