"""What can go wrong with a measurement."""

from lisa.core.errors import LisaError

__all__ = ["Fault"]


class Fault(LisaError):
    """A measurement could not be taken; the text says why."""
