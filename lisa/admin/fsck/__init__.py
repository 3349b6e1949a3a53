"""Proves on a running system that every message stands where it should, and nowhere else.

A body exists exactly while its message is live; a live id stands either in `waiting`, or for each
group that owes it in exactly one of that group's `entries`, `retry` and `garbage`; whatever else
names an id names a live one; and each entry of a ready stream is the one that the index names.

Nothing is stopped for it. The key space, hashes and sorted sets are walked by SCAN, streams by
windows, and each step holds a few hundred items at most. What moves meanwhile is never taken for
an orphan: ids are judged by the script that would mend them, in one atomic step, and stream
entries by facts that cannot come back (an entry id is never used twice).
"""

from lisa.admin.fsck.check import check
from lisa.admin.fsck.report import KINDS, Finding, Report

__all__ = ["KINDS", "Finding", "Report", "check"]
