"""Periods in equal steps, as histories and forecasts have them."""

from enum import Enum


class Steps(Enum):
    """A period: (number of steps, milliseconds of each)."""

    @property
    def count(self) -> int:
        """Number of steps."""
        steps: int = self.value[0]
        return steps

    @property
    def step_ms(self) -> int:
        """Length of a step in milliseconds."""
        length: int = self.value[1]
        return length
