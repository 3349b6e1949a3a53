"""The error of a failed measurement."""

from lisa.core.model.errors import LisaError


class Fault(LisaError):
    """A measurement failed; the text is the reason."""
