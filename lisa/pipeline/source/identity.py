"""Ids for rows that have none, and the tokens of calls: what makes a repeated job add nothing.

A row's id is made from the job's name, the row's content and its ordinal among equal rows. It is
the same whatever partition the row lies in, whichever attempt of a task sends it, and when the
whole job is run again. Ordinals are counted within one task; equal rows that lie in several tasks
would so get one id twice, which `lisa.pipeline.source.equal` finds and mends at the end.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import repeat

from lisa.pipeline.source.columns import Rows

__all__ = ["DIGEST_BYTES", "Identity", "Tokens", "digest_of", "id_of"]

DIGEST_BYTES = 12
MOST_SEEN = 1_000_000
"""Ids of one generation of tokens; beyond, a new one begins, so that memory stays bounded."""


def id_of(digest: bytes, ordinal: int) -> str:
    """The id of the row with this digest that is the nth of its kind, from 1."""
    return digest.hex() if ordinal == 1 else f"{digest.hex()}-{ordinal}"


def digest_of(message_id: str) -> bytes:
    """The digest in an id that `id_of` made."""
    return bytes.fromhex(message_id[: 2 * DIGEST_BYTES])


class Identity:
    """Gives ids to the rows of one task."""

    def __init__(self, job: str) -> None:
        self._seeded = blake2b(job.encode() + b"\0", digest_size=DIGEST_BYTES)
        self._seen: set[bytes] = set()
        self._again: Counter[bytes] = Counter()

    def ids(self, rows: Rows) -> list[str]:
        """An id for each row."""
        columns = zip(rows.dues, rows.ttls_ms, rows.policies, rows.topics or repeat(""), rows.tails,
                      strict=False)  # fmt: skip
        seeded, seen, again = self._seeded, self._seen, self._again
        made = []
        for due, ttl_ms, policy, topic, tail in columns:
            digesting = seeded.copy()
            digesting.update(f"{due}\n{ttl_ms}\n{policy}\n{topic}\n".encode() + tail)
            digest = digesting.digest()
            if digest in seen:
                again[digest] += 1
                made.append(id_of(digest, again[digest] + 1))
            else:
                seen.add(digest)
                made.append(digest.hex())
        return made


class Tokens:
    """Send tokens of one task and topic: the same in every attempt, whatever the order of rows.

    All calls share one token, so that a repeated row is answered as the first time. An id that
    comes again is another message, not a repetition: with it a new token begins.
    """

    def __init__(self, run: str, partition: int, topic: str) -> None:
        self._about = f"{run}\n{partition}\n{topic}\n"
        self._generation = -1
        self._seen: set[int] = set()
        self._next()

    def token_for(self, ids: Sequence[str]) -> str:
        """The token of the call that sends these."""
        hashes = set(map(hash, ids))
        if len(self._seen) >= MOST_SEEN or not self._seen.isdisjoint(hashes):
            self._next()
        self._seen |= hashes
        return self._token

    def _next(self) -> None:
        self._generation += 1
        self._seen.clear()
        digest = blake2b(f"{self._about}{self._generation}".encode(), digest_size=6).digest()
        # The tilde tells the scripts to keep tombstones for as long as `dedupe_for` says.
        self._token = "~" + urlsafe_b64encode(digest).decode()[:7]
