"""The amounts that are measured of each peer."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSizes:
    """The amounts for a peer.

    repeats: maximum number of repeats of each figure.
    most: maximum number of messages in one measurement.
    seconds: how long a measurement should keep the peer busy.
    start_seconds: maximum start time of a sending process on a busy machine.
    """

    repeats: int = 2
    most: int = 100_000
    seconds: float = 3.0
    start_seconds: float = 4.0

    @classmethod
    def of(cls, *, is_long: bool) -> PeerSizes:
        """The sizes of a long or a normal run."""
        return cls(repeats=3, seconds=5.0) if is_long else cls()

    def scaled(self, scale: float) -> PeerSizes:
        """Scale the amounts; `scale` is positive."""
        if scale == 1.0:
            return self
        return replace(
            self,
            most=max(20, int(self.most * scale)),
            seconds=max(0.2, self.seconds * scale),
            start_seconds=max(2.0, self.start_seconds * scale),
        )
