"""Derives ids for rows without ids, and send tokens, so that a repeated job adds nothing.

A row's id is derived from the job's name, the row's content and its ordinal among equal rows. It is
independent of the row's partition and of the attempt of the task, and is the same when the job is
repeated. Ordinals are counted within a task, so equal rows in several tasks get the same ids;
`lisa.pipeline.source.writer` corrects this at the end.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import repeat

from lisa.core.model.keys import keyed_id, own_id_of
from lisa.core.model.sharding import KEY_END
from lisa.pipeline.source.rows import MessageColumns

DIGEST_BYTES = 12
MOST_SEEN = 1_000_000
"""Maximum number of ids per token; bounds the memory of a task."""


def id_of(digest: bytes, ordinal: int) -> str:
    """The id of the nth row with this digest; ordinals begin at 1."""
    return digest.hex() if ordinal == 1 else f"{digest.hex()}-{ordinal}"


def digest_of(message_id: str) -> bytes:
    """The digest in an id that `id_of` made, perhaps after a key."""
    return bytes.fromhex(own_id_of(message_id)[: 2 * DIGEST_BYTES])


class Identity:
    """Assigns ids to the rows of one task."""

    def __init__(self, job: str) -> None:
        self._seeded = blake2b(job.encode() + b"\0", digest_size=DIGEST_BYTES)
        self._seen: set[bytes] = set()
        self._again: Counter[bytes] = Counter()

    def ids(self, rows: MessageColumns) -> list[str]:
        """One id per row, in order; that of a row with a key includes it."""
        made = self._own_ids(self._digests(rows))
        return list(map(keyed_id, rows.keys, made)) if rows.keys else made

    def _own_ids(self, digests: Sequence[bytes]) -> list[str]:
        seen, again = self._seen, self._again
        fresh = set(digests)
        if len(fresh) == len(digests) and seen.isdisjoint(fresh):
            seen |= fresh
            return [digest.hex() for digest in digests]
        made = []
        for digest in digests:
            if digest in seen:
                again[digest] += 1
                made.append(id_of(digest, again[digest] + 1))
            else:
                seen.add(digest)
                made.append(digest.hex())
        return made

    def _digests(self, rows: MessageColumns) -> list[bytes]:
        columns = zip(
            rows.asked,
            rows.ttls_ms,
            rows.policies,
            rows.topics or repeat(""),
            rows.keys or repeat(None),
            rows.tails,
            strict=False,
        )
        start = self._seeded.copy
        digests = []
        for due, ttl_ms, policy, topic, key, tail in columns:
            digesting = start()
            about = f"{due}\n{ttl_ms}\n{policy}\n{topic}\n"
            if key is not None:
                about += f"{key}{KEY_END}"
            digesting.update(b"%b%b" % (about.encode(), tail))
            digests.append(digesting.digest())
        return digests


class Tokens:
    """Send tokens of one task and topic; equal in every attempt, independent of the order of rows.

    All calls share one token, so that a row repeated by another attempt gets the first answer
    again. If an id occurs twice within a task, the second row is another message and starts a new
    token.
    """

    def __init__(self, run: str, partition: int, topic: str) -> None:
        self._about = f"{run}\n{partition}\n{topic}\n"
        self._generation = -1
        self._seen: set[int] = set()
        self._next()

    def token_for(self, ids: Sequence[str]) -> str:
        """The token of the call that sends these ids."""
        hashes = set(map(hash, ids))
        if len(self._seen) >= MOST_SEEN or not self._seen.isdisjoint(hashes):
            self._next()
        self._seen |= hashes
        return self._token

    def _next(self) -> None:
        self._generation += 1
        self._seen.clear()
        digest = blake2b(f"{self._about}{self._generation}".encode(), digest_size=6).digest()
        # The tilde makes the scripts keep tombstones for `dedupe_for`.
        self._token = "~" + urlsafe_b64encode(digest).decode()[:7]
