"""The manager role: promote due messages, reclaim expired leases, clean up."""

from lisa.core.model.extras import requires

with requires("standard"):
    from lisa.manager.daemon import Manager

__all__ = ["Manager"]
