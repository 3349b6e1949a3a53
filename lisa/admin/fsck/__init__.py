"""Checks the consistency of all messages on a running system.

The invariants: A body exists exactly while its message is live. A live id is either in `waiting`,
or, for each group that still has to settle it, in exactly one of the group's `entries`, `retry`
and `garbage`. Every other record names a live id. Every entry of a ready stream is in the index.

The check reads the key space, hashes and sorted sets with SCAN and streams in pages, at most a few
hundred items per step. Messages that change state meanwhile cause no false findings: the script
that repairs ids also checks them, atomically, and the findings about stream entries stay true,
because an entry id is never used twice.
"""

from lisa.admin.fsck.check import check
from lisa.admin.fsck.report import KINDS, CheckReport, Finding

__all__ = ["KINDS", "CheckReport", "Finding", "check"]
