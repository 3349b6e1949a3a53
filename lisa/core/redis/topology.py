"""Tracks which cluster node owns which slot, and ignores unreliable answers.

Several nodes are asked in parallel. A node that was removed, is partitioned with a minority, or has
just restarted reports no slots, a cluster that is down, or an earlier epoch. Such an answer changes
nothing.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import redis

from lisa.core.redis.address import SENTINEL_TIMEOUT_S, Address
from lisa.core.redis.pools import Pool

SLOTS = 16_384
SAMPLE = 3
"""Number of nodes to ask first; the others are asked only if none of these is reliable."""
AVOIDED_S = 30.0
"""How long a node that did not answer comes last for commands without a key."""

T = TypeVar("T")
A = TypeVar("A")

OTHERS_S = 0.1
"""Time to wait for further answers after the first."""

NodeAddress = tuple[str, int]


class View(NamedTuple):
    """One node's report of its cluster. `epoch` is None if the user may not run CLUSTER INFO."""

    is_up: bool
    epoch: int | None
    ranges: tuple[tuple[int, int, tuple[NodeAddress, ...]], ...]
    ids: frozenset[str]

    @property
    def primaries(self) -> list[NodeAddress]:
        """The nodes that own slots, in order of the slots."""
        return list(dict.fromkeys(nodes[0] for _, _, nodes in self.ranges))

    @property
    def members(self) -> list[NodeAddress]:
        """Primaries and replicas."""
        return list(dict.fromkeys(node for _, _, nodes in self.ranges for node in nodes))


UNKNOWN = View(is_up=False, epoch=None, ranges=(), ids=frozenset())
"""Before the first reliable answer."""


def believed(views: Sequence[View], known: View, *, is_last: bool) -> View | None:
    """Select the view to use; None if no answer is reliable.

    is_last: all nodes have been asked.
    """
    usable = [view for view in views if view.is_up and view.ranges]
    if known is UNKNOWN:
        if not usable and is_last:  # the cluster is down: let calls report that
            usable = [view for view in views if view.ranges]
        return _newest(usable)
    # A node that now belongs to another cluster shares no node ids with the known view.
    related = [view for view in usable if view.ids & known.ids]
    current = [view for view in related if (view.epoch or 0) >= (known.epoch or 0)]
    current = current or [view for view in related if view.epoch is None]
    if current or not is_last:
        return _newest(current)
    if 2 * len(related) > len(known.primaries):
        return _newest(related)  # the node that reported the later epoch is gone
    return None if related else _newest(usable)  # the whole cluster was replaced


def _newest(views: Sequence[View]) -> View | None:
    """The view with the latest epoch; on a tie, the one that most nodes report."""
    return max(
        views,
        key=lambda view: (view.epoch or 0, sum(view.ranges == other.ranges for other in views)),
        default=None,
    )


class Topology:
    """One cluster's slots, shared by all clients in the process with the same address.

    `connect` creates a pool for one node, with short timeouts. `rounds` counts the refreshes.
    """

    def __init__(
        self,
        seeds: Sequence[NodeAddress],
        connect: Callable[[NodeAddress], Pool],
        remap: Callable[[NodeAddress], NodeAddress] | None = None,
    ) -> None:
        self._seeds = list(seeds)
        self._connect = connect
        self._remap = remap or (lambda node: node)
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self.rounds = 0
        self._is_known = False
        self._error: Exception = redis.ConnectionError("the cluster was not asked yet")
        self._view = UNKNOWN
        self._owners: list[NodeAddress | None] = [None] * SLOTS
        self._failed: dict[NodeAddress, float] = {}
        self._probes: dict[NodeAddress, Pool] = {}
        self._scanned: list[NodeAddress] = []

    def owner(self, slot: int) -> NodeAddress | None:
        """The node that owns a slot; None if unknown."""
        return self._owners[slot]

    def moved(self, slot: int, node: NodeAddress) -> None:
        """Record a redirection: `node` owns the slot."""
        with self._lock:
            self._owners[slot] = node

    def failed(self, node: NodeAddress) -> None:
        """Record that a node did not answer; commands without a key prefer other nodes."""
        with self._lock:
            self._failed[node] = time.monotonic()

    def answered(self, node: NodeAddress) -> None:
        """Record that a node answered."""
        if node in self._failed:
            with self._lock:
                self._failed.pop(node, None)

    def has_failed(self, node: NodeAddress) -> bool:
        """Whether a node did not answer within the last `AVOIDED_S`, nor has answered since."""
        return time.monotonic() - self._failed.get(node, -math.inf) < AVOIDED_S

    @property
    def primaries(self) -> list[NodeAddress]:
        """All nodes that own slots; nodes that failed recently come last."""
        return sorted(self._view.primaries, key=self.has_failed)

    @property
    def ranges(self) -> list[tuple[int, int, NodeAddress]]:
        """First slot, last slot and primary of each range, sorted; empty if unknown."""
        return sorted((first, last, nodes[0]) for first, last, nodes in self._view.ranges)

    @property
    def members(self) -> list[NodeAddress]:
        """All primaries and known replicas."""
        return self._view.members

    def redirected(self, host: str, port: int, by: NodeAddress) -> NodeAddress:
        """The target of a redirection; without a host, the redirecting node's host applies."""
        return self._remap((host or by[0], port))

    def scan_node(self, cursor: int) -> tuple[NodeAddress | None, int]:
        """The node and cursor at which a scan continues; None if the node owns no slots now."""
        known = self.primaries
        with self._lock:
            # The list only grows, so a cursor keeps its meaning when nodes join or leave.
            self._scanned += [node for node in sorted(known) if node not in self._scanned]
            inner, number = divmod(cursor, SLOTS)
            node = self._scanned[number] if number < len(self._scanned) else None
        return (node if node in known else None), inner

    def scan_cursor(self, cursor: int, inner: int) -> int:
        """The next cursor after a page; `inner` is the node's own cursor, 0 at its end."""
        number = cursor % SLOTS
        if inner:
            return inner * SLOTS + number
        known = self.primaries
        later = range(number + 1, len(self._scanned))
        return next((i for i in later if self._scanned[i] in known), 0)

    def refresh(self, seen: int | None = None) -> bool:
        """Ask the nodes for their slots. Returns whether a reliable node answered.

        Concurrent callers share one answer; `seen` is the number of `rounds` when the caller had
        its reason, by default now. Raises the client's errors if there was never a reliable answer.
        """
        seen = self.rounds if seen is None else seen
        with self._asking:
            if seen == self.rounds:
                view, self._error = self._look()
                if view is not None:
                    self._adopt(view)
                self._is_known = view is not None
                self.rounds += 1
        if self._view is UNKNOWN:
            raise self._error
        return self._is_known

    def forked(self) -> None:
        """Reset locks and connections in a forked child process."""
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._probes = {}

    def _look(self) -> tuple[View | None, Exception]:
        members = self.members
        random.shuffle(members)
        seeds = [node for node in self._seeds if node not in members]
        parts = [members[:SAMPLE], members[SAMPLE:], seeds]
        views: list[View] = []
        error: Exception = redis.ConnectionError("no node of the cluster answers")
        for part in parts:
            for answer in ask_together(part, self._ask) if part else ():
                if isinstance(answer, View):
                    views.append(answer)
                elif not isinstance(error, redis.ResponseError):  # keep the most specific error
                    error = answer
            view = believed(views, self._view, is_last=part is seeds)
            if view is not None:
                return view, error
        return None, error

    def _adopt(self, view: View) -> None:
        owners: list[NodeAddress | None] = [None] * SLOTS
        for first, last, nodes in view.ranges:
            owners[first : last + 1] = [nodes[0]] * (last + 1 - first)
        with self._lock:
            self._view, self._owners = view, owners
            self._failed = {node: at for node, at in self._failed.items() if node in view.members}
            gone = [node for node in self._probes if node not in view.members]
            probes = [self._probes.pop(node) for node in gone]
        for probe in probes:
            probe.close()

    def _ask(self, node: NodeAddress) -> View:
        with self._lock:
            probe = self._probes.get(node)
            if probe is None:
                probe = self._probes[node] = self._connect(node)
        info, slots = probe.execute_many([("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
        if isinstance(slots, Exception):
            raise slots
        is_up, epoch = True, None
        if not isinstance(info, Exception):  # some users may not run CLUSTER INFO
            fields = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            is_up = fields.get("cluster_state") == "ok"
            epoch = int(fields.get("cluster_current_epoch", 0))
        ranges = tuple(
            (int(row[0]), int(row[1]), tuple(self._node(member, node) for member in row[2:]))
            for row in slots
        )
        ids = frozenset(
            member[2].decode() for row in slots for member in row[2:] if len(member) > 2
        )
        return View(is_up, epoch, ranges, ids)

    def _node(self, reported: Sequence[Any], asked: NodeAddress) -> NodeAddress:
        """The address of a node in the report of the node `asked`."""
        host = (reported[0] or b"").decode()
        if host in {"", "?"}:  # a node reports this for itself if it does not know its own host
            host = asked[0]
        return self._remap((host, int(reported[1])))


def ask_together(asked: Iterable[A], ask: Callable[[A], T]) -> list[T | Exception]:
    """Call `ask` for all items in parallel and return the answers and errors that arrive in time.

    After the first answer, the others get `OTHERS_S` more.
    """
    replies: SimpleQueue[T | Exception] = SimpleQueue()

    def work(one: A) -> None:
        try:
            replies.put(ask(one))
        except Exception as error:  # noqa: BLE001  errors are returned as answers
            replies.put(error)

    count = 0
    for node in asked:
        count += 1
        try:
            threading.Thread(target=work, args=(node,), name="lisa-ask", daemon=True).start()
        except RuntimeError:  # the thread limit is reached, or the process is exiting
            work(node)
    found: list[T | Exception] = []
    ends = time.monotonic() + 2 * SENTINEL_TIMEOUT_S  # one for connecting, one for the reply
    with suppress(Empty):
        while len(found) < count:
            found.append(replies.get(timeout=max(0.0, ends - time.monotonic())))
            if not isinstance(found[-1], Exception):
                ends = min(ends, time.monotonic() + OTHERS_S)
    return found


_known: weakref.WeakValueDictionary[Any, Topology] = weakref.WeakValueDictionary()
_known_lock = threading.Lock()


def _forked() -> None:
    _known_lock._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001  as threading does
    for topology in list(_known.values()):
        topology.forked()


os.register_at_fork(after_in_child=_forked)


def topology_of(address: Address, make: Callable[[], Topology]) -> Topology:
    """The topology shared by all clients of an address; `make` creates it if necessary."""
    with _known_lock:
        found = _known.get(address.identity)
        if found is None:
            found = _known[address.identity] = make()
        return found
