"""The known topics, and the declarations of the configuration.

Topics come from the configuration, from the list in which producers register topics, and from a
search over the keys. The manager serves each shard of a sharded topic as a separate topic; the
configuration names only the topic itself.

Options and groups are declared when the manager first reaches the server, and again when the
server restarted or was emptied. A declaration changes only schedules that a declaration wrote last,
so an operator's changes stay. Groups are also declared on topics where consumers wait for one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.keys import Keys, is_shard_name
from lisa.core.model.options import warning
from lisa.core.model.recurring.definition import ScheduleDefinition
from lisa.core.model.sharding import Shard, Topic, own_shard, topic_of, topics_of
from lisa.core.store import presence, schedules
from lisa.core.store.limits import DECLARED
from lisa.core.store.replies import pairs
from lisa.core.store.reshard import lost_shards, spread, unnamed
from lisa.core.store.store import SyncStore, chunks, grouped
from lisa.core.transitions.base import text
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.topic import Configure, LimitKeys
from lisa.manager.bulk_reads import PAGE, ask_each, topics_with_keys
from lisa.manager.loop import NextDue
from lisa.manager.nodes import Nodes
from lisa.manager.plan import Plan, TopicPlan, differences
from lisa.manager.topic_log import TopicErrors, TopicLog

SEARCH_PAGE = 1_000
LISTED_PER_S = 1_000
"""Entries of the list of topics that are read per second, on average."""
_DECLARED = "declared:"  # a declared option's second field in the options hash, see configure

FIELD = "schedules"
"""The field of a topic's options hash with the names of declared schedules, a JSON list."""

MOST_REPORTED = 1000
"""Topics in which a starting manager looks for schedules of other files."""

log = logging.getLogger(__name__)


class Registry:
    """The topics of one manager.

    on_new_topic: called with each newly learned topic or shard.
    nodes: tells which nodes answer; without it, every node is called.
    """

    def __init__(
        self,
        store: SyncStore,
        plan: Plan,
        on_new_topic: Callable[[Shard], None],
        nodes: Nodes | None = None,
    ) -> None:
        self.plan = plan
        self.topic_errors = TopicErrors("registry")
        self.batches: dict[str, int] = {}
        """The most messages that one promote call moves, for configured topics and their shards."""
        self._store = store
        self._on_new_topic = on_new_topic
        self._nodes = nodes
        self._lock = threading.Lock()
        self._topics: set[Shard] = set()
        self._sorted: list[Shard] | None = None  # `_topics`, until they change
        self._count = 0  # topics in `_sorted`
        self._list_at = -math.inf
        self._is_reported = False
        self._undeclared: set[str] = set(plan.topics)
        _warn(plan)

    @property
    def topics(self) -> list[Shard]:
        """All known topics and shards, sorted by name; not to be changed."""
        with self._lock:
            if self._sorted is None:
                self._sorted = sorted(self._topics)
                self._count = len(topics_of(self._sorted))
            return self._sorted

    @property
    def topic_count(self) -> int:
        """The number of known topics; the shards of one topic count once."""
        return self._count if self.topics else 0

    def is_kept(self, shard: str) -> bool:
        """Whether a shard stays listed even when idle: its topic is configured or sharded."""
        topic = topic_of(shard)
        layout = self._store.known_layout(topic)
        if shard != own_shard(topic):
            return layout is not None and shard in layout.active(topic)
        return topic in self.plan.topics or (layout is not None and layout.is_split)

    def learn(self, names: Iterable[str]) -> None:
        """Add topics and shards; ignores invalid names."""
        for shard in map(Shard, filter(is_shard_name, names)):
            with self._lock:
                new = shard not in self._topics
                if new:
                    self._topics.add(shard)
                    self._sorted = None
                    self._set_batch(shard)
            if new:
                self._on_new_topic(shard)

    def forget(self, shard: str) -> None:
        """Remove a shard until `learn` adds it again."""
        with self._lock:
            self._topics.discard(Shard(shard))
            self._sorted = None
            self.batches.pop(Shard(shard), None)
        self.topic_errors.forget(shard)

    def declare_again(self, concerned: Callable[[str], bool] = lambda _: True) -> None:
        """Have the next `step` declare the configured topics for which `concerned` is true."""
        with self._lock:
            self._undeclared |= set(filter(concerned, self.plan.topics))

    def step(self, *, is_hurried: bool = True) -> None:
        """Learn the registered topics and declare those still undeclared. Raises LisaError.

        is_hurried: whether to read the list of topics even if it is long and was read shortly
            before. Clients announce the topics that they list.
        """
        # Learn first: declarations fail while the server is at maxmemory, yet it must be drained.
        self.learn(self.plan.topics)
        failed: LisaError | None = None
        if self._is_list_there and (is_hurried or time.monotonic() >= self._list_at):
            try:
                listed = self._store.drive(self._store.shards())
                names = {*listed, *map(topic_of, listed)}
                if not self._store.has_nodes:
                    self._read_groups(sorted(names.difference(self.topics)))
                self.learn(names)
                self._list_at = time.monotonic() + len(listed) / LISTED_PER_S
            except ServerUnavailable as error:
                if not self._store.has_nodes:
                    raise
                failed = error
        self._declare_all()
        if failed is not None:
            raise failed
        if not self._is_reported:
            _report_others(self._store, self.plan.topics)
            self._is_reported = True

    def _declare_all(self) -> None:
        """Declare the topics that are still undeclared. Raises LisaError."""
        with self._lock:
            undeclared = sorted(self._undeclared)
        if undeclared:
            self._store.drive(self._store.register(undeclared))
        for topic in undeclared:
            if self._nodes is not None and not self._nodes.answers(topic):
                continue
            plan = self.plan
            try:
                self._declare(topic, plan.topics.get(topic, TopicPlan()))
            except LisaError as error:
                self.topic_errors.failed(topic, error)
                continue
            self.topic_errors.passed(topic)
            with self._lock:
                if self.plan is plan:
                    self._undeclared.discard(topic)
                else:  # another plan came meanwhile, and may have been declared by another thread
                    self._undeclared.add(topic)

    def _read_groups(self, topics: Sequence[str]) -> None:
        """Read the groups of new topics, many in one round trip."""
        for part in chunks(topics, PAGE):
            reads = {topic: [("HKEYS", self._store.keys.topic(topic).groups)] for topic in part}
            for topic, (reply,) in ask_each(self._store, reads).items():
                if isinstance(reply, list):
                    self._store.learn_groups(topic, reply)

    @property
    def _is_list_there(self) -> bool:
        return self._nodes is None or self._nodes.answers(key=self._store.keys.topics)

    def list_again(self) -> None:
        """Write all known topics to the list again, after it may have been lost.

        Not the shards that have left their topic: another manager may have deleted them meanwhile.
        Raises LisaError.
        """
        listed, known = list[Shard](), grouped((topic_of(shard), shard) for shard in self.topics)
        layouts = self._store.drive(self._store.layouts(list(known)))
        for (topic, shards), layout in zip(known.items(), layouts, strict=True):
            former = {*unnamed(shards, topic, layout)}
            if former:
                former -= {*self._store.drive(lost_shards(self._store, topic, shards))}
            listed += [shard for shard in shards if shard not in former]
        self._store.drive(self._store.list_again(listed))

    def search(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Find unlisted topics by scanning all keys, and list them again. Raises LisaError.

        Ends early once `is_over` returns true.

        On a cluster, scans one node after the other. If a node does not answer, raises its error
        after the others were scanned.
        """
        pattern = self._store.keys.structure_pattern()
        cursor, found, scheduled, failed = 0, set[Shard](), set[Shard](), None
        while True:
            try:
                reply, page = self._store.ask(
                    "SCAN", cursor, "MATCH", pattern, "COUNT", SEARCH_PAGE
                )
            except ServerUnavailable as error:
                failed = error
                cursor = self._store.connection.behind(cursor)
            else:
                for key in map(text, page):
                    _note_shard(self._store.keys, key, found, scheduled)
                cursor = int(reply)
            if not cursor or is_over():
                break
        lost = sorted(found - set(self.topics))
        if lost:
            log.info("found unlisted topics: %s", ", ".join(lost))
            self.learn(lost)
            self._store.drive(self._store.register(lost))
        for topic in sorted(scheduled):
            self._store.ask("ZADD", self._store.keys.scheduled, "NX", 0, topic)
        if failed is not None:
            raise failed

    def reconfigure(self, plan: Plan) -> list[str]:
        """Switch to another plan and return the differences as text."""
        changes = differences(self.plan, plan)
        if (self.plan.schedules, self.plan.window) != (plan.schedules, plan.window):
            changes.append("the intervals of services, or count, changed: restart to apply them")
        with self._lock:
            scheduled = {topic for topic, options in self.plan.topics.items() if options.schedules}
            self.plan = plan
            _warn(plan)
            for shard in self._topics:
                self._set_batch(shard)
            self._undeclared |= {*plan.topics, *scheduled}
        return changes

    def _set_batch(self, shard: Shard) -> None:
        plan = self.plan.topics.get(topic_of(shard))
        if plan is None:
            self.batches.pop(shard, None)
        else:
            self.batches[shard] = plan.batch

    def _declare(self, topic: str, plan: TopicPlan) -> None:
        if plan.options is not None:
            stored = pairs(self._store.ask("HGETALL", self._store.keys.topic(topic).options))
            names = {text(field) for field in stored}
            earlier = {name[len(_DECLARED) :] for name in names if name.startswith(_DECLARED)}
            # Remove options that an earlier configuration declared and this one does not.
            values: dict[str, str | None] = dict.fromkeys(sorted(earlier - plan.options.keys()))
            values |= plan.options
            changed = self._store.call(Configure(topic, values, declared=True)) if values else 0
            if changed:
                TopicLog(log, topic).info("%d options declared", changed)
            _declare_limits(self._store, topic, names, plan.key_limits)
        for group in plan.groups:
            if self._store.call(Declare(topic, group)):
                TopicLog(log, topic, group).info("declared")
        self._store.drive(spread(self._store, Topic(topic)))
        _declare_schedules(self._store, topic, plan.schedules)

    # -- groups for consumers that wait on a topic without any; messages do not suffice

    def awaited(self, topics: Sequence[str]) -> list[str]:
        """Topics without a known group that now have a group or a waiting consumer.

        Called each second. Raises ServerUnavailable.
        """
        keys = self._store.keys.topic
        return topics_with_keys(
            self._store,
            {
                topic: [keys(topic).groups, keys(topic).consumers]
                for topic in topics
                if not self._store.known_groups(topic)
            },
        )

    def declare_awaited(self, topics: Sequence[str]) -> list[NextDue]:
        """Declare groups where consumers wait. Raises LisaError.

        A topic is due again once it is among the awaited, or announced.
        """
        for topic in topics:
            self._declare_awaited(topic)
        return [None] * len(topics)

    def _declare_awaited(self, topic: str) -> None:
        if self._store.drive(self._store.groups(topic)):
            return
        keys = self._store.keys.topic(topic)
        now_ms = self._store.drive(self._store.server_time_ms(keys.consumers))
        records = self._store.drive(presence.consumers(self._store, topic))
        waiting = [record.name for record in presence.alive(records, now_ms) if not record.group]
        if not waiting:
            return
        whole = topic_of(topic)
        known = () if whole == topic else self._store.drive(self._store.groups(whole))
        for group in known or self.plan.groups_for(whole):
            self._store.call(Declare(whole, group))
            TopicLog(log, topic, group).info("declared for %s", ", ".join(waiting))
        self._store.drive(spread(self._store, whole))
        self._store.drive(self._store.groups(topic))


def _note_shard(keys: Keys, key: str, found: set[Shard], scheduled: set[Shard]) -> None:
    """Note the shard of a key that exists only while it holds messages, or schedules."""
    shard = keys.shard_of(key)
    if shard is None:
        return
    own = keys.topic(shard)
    group = own.group_of(key)
    if key in (own.schedules, own.local):
        scheduled.add(shard)
    elif key == own.waiting or (group and key != own.group(group).ready):
        found.add(shard)


def _warn(plan: Plan) -> None:
    """Log a warning for each valid but harmful option."""
    for topic, topic_plan in plan.topics.items():
        line = warning(topic, topic_plan.options or {})
        if line is not None:
            log.warning(line)


def _declare_limits(
    store: SyncStore, topic: str, fields: Iterable[str], wanted: Mapping[str, str]
) -> None:
    """Declare limits of keys, and remove those that an earlier configuration declared."""
    earlier = {name[len(DECLARED) :] for name in fields if name.startswith(DECLARED)}
    changes = dict.fromkeys(sorted(earlier - wanted.keys()), "") | dict(wanted)
    for page in chunks(list(changes.items()), PAGE):
        if changed := store.call(LimitKeys(topic, "declare", dict(page))):
            TopicLog(log, topic).info("limits of %d keys declared", changed)


def _declare_schedules(
    store: SyncStore, topic: str, wanted: Mapping[str, ScheduleDefinition]
) -> None:
    """Declare a topic's schedules, and remove those that are no longer declared.

    Raises LisaError. If only some schedules fail, it names them, after all others were declared.
    """
    key = store.keys.topic(topic).options
    stored = store.ask("HGET", key, FIELD)
    try:
        earlier: list[str] = msgspec.json.decode(stored, type=list[str]) if stored else []
    except msgspec.DecodeError as error:
        raise LisaError(f"field {FIELD} of {key}: {error}; delete the field") from error
    if not wanted and not earlier:
        return
    names = sorted({*earlier, *wanted})
    if names != earlier:  # before they exist: an interrupted declaration can be taken back
        store.ask("HSET", key, FIELD, msgspec.json.encode(names))
    failures = []
    for name in names:
        try:
            _declare_schedule(store, topic, name, wanted.get(name))
        except ServerUnavailable:
            raise
        except LisaError as error:
            failures.append(f"schedule {name}: {error}")
    if failures:
        raise LisaError("; ".join(failures))
    if not wanted:
        store.ask("HDEL", key, FIELD)
    elif names != sorted(wanted):
        store.ask("HSET", key, FIELD, msgspec.json.encode(sorted(wanted)))


def _report_others(store: SyncStore, named: Collection[str]) -> None:
    """Log the declared schedules of topics that this configuration does not name; they stay.

    Another manager's file may declare them, or an earlier version of this one. Raises LisaError.
    """
    listed = store.ask("ZRANGE", store.keys.scheduled, 0, MOST_REPORTED - 1)
    topics = [topic for topic in map(text, listed) if topic not in named]
    reads = {topic: [("HGET", store.keys.topic(topic).options, FIELD)] for topic in topics}
    found = []
    for topic, (reply,) in ask_each(store, reads).items():
        if isinstance(reply, bytes):
            found += [f"{topic}/{name}" for name in msgspec.json.decode(reply, type=list[str])]
    if found:
        log.info(
            "declared by a manager's file, but not by this one: the schedules %s; "
            "`lisa schedules remove TOPIC NAME` removes one",
            ", ".join(found),
        )


def _declare_schedule(
    store: SyncStore, topic: str, name: str, definition: ScheduleDefinition | None
) -> None:
    """Declare one schedule; None removes it."""
    if definition is None:
        if store.drive(schedules.remove(store, topic, name, only_declared=True)):
            TopicLog(log, topic).info("schedule %s removed", name)
    elif store.drive(schedules.put(store, topic, name, definition, declared=True)):
        TopicLog(log, topic).info("schedule %s declared", name)
