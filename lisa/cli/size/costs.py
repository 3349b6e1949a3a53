"""The costs of a message, as measured by `lisa bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

import msgspec

from lisa.core.model.errors import ConfigError

BODY_BYTES = 100
"""The size of the bodies behind all costs but `kilobyte`."""

Figures = Callable[[str, str], float]
"""Lisa's figure by measure and name. Raises KeyError."""


class _Figure(msgspec.Struct):
    measure: str
    subject: str
    name: str
    values: list[float]


class _Report(msgspec.Struct):
    figures: list[_Figure]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """CPU time in microseconds, and memory in bytes.

    A step on a batch of k messages costs `call + k * message`.

    send: Redis, per send call. life: Redis, from the promotion to the ack of a batch. manager,
    consumer: these processes. kilobyte: Redis, per kB of a body for its whole life. waiting: server
    memory per waiting message besides its body. tombstone: server memory per settled message until
    its `retention` ends.
    """

    send_call: float
    send_message: float
    life_call: float
    life_message: float
    kilobyte: float
    manager_call: float
    manager_message: float
    consumer_call: float
    consumer_message: float
    waiting: float
    tombstone: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """The costs in the report.json of `lisa bench --out`.

        Raises ConfigError if the file is not a benchmark report or lacks a measurement.
        """
        try:
            report = msgspec.json.decode(path.read_bytes(), type=_Report)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not a report of lisa bench: {error}") from error
        found = {
            (one.measure, one.name): median(one.values)
            for one in report.figures
            if one.subject == "lisa" and one.values
        }
        try:
            return cls.of(lambda measure, name: found[measure, name])
        except KeyError as error:
            measure, name = error.args[0]
            raise ConfigError(
                f"{path} lacks the figure {name!r} of {measure}: repeat `lisa bench --out` with"
                f" --only {measure}, or without --only"
            ) from error

    @classmethod
    def of(cls, figure: Figures) -> Self:
        """Derive the costs: a drain has large batches, the light load batches of one message."""
        send_message = figure("bulk_send", "redis")
        life_message = figure("drain", "redis") - send_message
        singly = {part: figure("light_load", f"{part} at 1,000/s") for part in ("redis", *_WORKERS)}
        batched = {part: figure("drain", part) for part in _WORKERS}
        return cls(
            send_call=_beyond(figure("single_send", "redis"), send_message),
            send_message=send_message,
            life_call=_beyond(singly["redis"], life_message),
            life_message=life_message,
            kilobyte=figure("bodies", "redis per kB"),
            manager_call=_beyond(singly["manager"], batched["manager"]),
            manager_message=batched["manager"],
            consumer_call=_beyond(singly["consumer"], batched["consumer"]),
            consumer_message=batched["consumer"],
            waiting=figure("memory", "embedded server") - BODY_BYTES,
            tombstone=figure("drain", "tombstone"),
        )


_WORKERS = ("manager", "consumer")


def _beyond(single: float, message: float) -> float:
    """The part of a single message's cost that occurs once per batch."""
    return max(0.0, single - message)


MEASURED = Costs(
    send_call=54.0,
    send_message=2.9,
    life_call=243.0,
    life_message=16.0,
    kilobyte=4.9,
    manager_call=187.0,
    manager_message=1.6,
    consumer_call=314.0,
    consumer_message=11.5,
    waiting=199.0,
    tombstone=148.0,
)
"""Measured on two shared cores (AMD EPYC, Valkey 9.1, Python 3.11); the default of `lisa size`."""
