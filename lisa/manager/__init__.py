"""The manager's role: moves what is due, takes back what was not settled, sweeps up."""

from lisa.manager.daemon import Manager

__all__ = ["Manager"]
