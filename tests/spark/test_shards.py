"""A topic whose shard count changes: its journals, archive, audit, search, loss and restore."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from pyspark.sql import Row
from pyspark.sql.streaming.datasource import ReadMaxRows

from lisa.admin import topics
from lisa.admin.journal import forget
from lisa.admin.reading import entry_number
from lisa.core.model.errors import LisaError
from lisa.core.model.sharding import Shard, Topic, shard_suffix, topic_of
from lisa.core.transitions.base import text
from lisa.core.transitions.inspect import Inspection
from lisa.core.transitions.journal import ARCHIVE_HOLDS_MS
from lisa.manager.pruner import Pruner
from lisa.pipeline.archive import Archive
from lisa.pipeline.archive.base import ArchiveGap, TopicRecord
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.archive import Progress
from lisa.pipeline.jobs.lookup import inspected, known
from lisa.pipeline.jobs.message_history import find_remainders
from lisa.pipeline.jobs.restore import prepare
from lisa.pipeline.jobs.search import Query, search
from lisa.pipeline.source.events import Mark
from lisa.pipeline.source.following import record_archived
from lisa.pipeline.source.journal import JournalBundle, JournalReader
from tests.shards import ORDERS, Split
from tests.spark.jobs import KEYS, Jobs
from tests.spark.journals import Following, Journal
from tests.spark.worlds import ArchiveSnapshot, World, counted

LATER = timedelta(hours=1)
DUE_MS = 4_102_444_800_000  # 2100
LOST_MS = 1_790_000_000_000
WITHIN_S = 240

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def split(redis_url: str) -> Split:
    return Split(redis_url)


@pytest.fixture
def world(split: Split, jobs: Jobs) -> World:
    return jobs.world()


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


def archived(jobs: Jobs) -> list[tuple[str, str, int]]:
    rows = jobs.opened().log().where("state != 'gap'").select("topic", "shard", "number")
    return sorted((row.topic, row.shard or "", row.number) for row in rows.collect())


def written(split: Split) -> list[tuple[str, str, int]]:
    """The number of all events, over all journals."""
    found = []
    for shard_name in split.layout.counted(ORDERS):
        last = int(split.store.ask("HGET", split.keys(shard_name).stats, "journaled") or 0)
        found += [("orders", shard_name.partition("~")[2], number + 1) for number in range(last)]
    return sorted(found)


def handle(split: Split, world: World, do: Callable[[World, dict[str, Any]], None]) -> None:
    """Deliver all due messages of the present shards, shard by shard."""
    for shard_name in split.layout.current(ORDERS):
        one = world.at(shard_name)
        one.promote()
        ready = split.store.ask("XLEN", split.keys(shard_name).group("lisa").ready)
        do(one, {entry.id: entry for entry in one.take("lisa", ready)})


def copies(split: Split) -> Counter[str]:
    """Id -> number of occurrences, over all shards of all shard counts."""
    found: Counter[str] = Counter()
    for shard_name in split.layout.counted(ORDERS):
        keys = split.keys(shard_name)
        own = keys.group("lisa")
        for one in (keys.waiting, own.retry, own.garbage):
            found.update(map(text, split.store.ask("ZRANGE", one, 0, -1)))
        found.update(map(text, split.store.ask("HKEYS", own.entries)))
    return found


def seen(split: Split, ids: list[str]) -> dict[str, Inspection]:
    return dict(zip(ids, split.store.drive(inspected(split.store, "orders", ids)), strict=True))


def settle_some(one: World, taken: dict[str, Any]) -> None:
    """Six are acked, three failed, one is in garbage; the others keep their state."""
    one.ack("lisa", [taken[name] for name in names("a", 6) if name in taken])
    one.fail("lisa", [taken[name] for name in ("a6", "a7", "a8") if name in taken], 3_600_000)
    one.fail("lisa", [taken[name] for name in ("a9",) if name in taken], "discard")
    one.release("lisa", [taken[name] for name in ("a10", "a11") if name in taken])


def change_meanwhile(split: Split, world: World, jobs: Jobs) -> None:
    """Run the archive, change the shard count, and continue until everything is archived."""
    stop, before = threading.Event(), len(archived(jobs))
    limit = threading.Timer(WITHIN_S, stop.set)
    changed: list[int] = []

    def told(progress: Progress) -> None:
        if not changed:
            changed.append(split.into(3).shards)
            world.send(names("b", 10), delay=LATER)
            for known in ("a0", "u0"):  # one is settled, one is live under the topic's own keys
                again: dict[str, Any] = {"id": known, "on_duplicate": "replace", "delay": LATER}
                world.producer.send("orders", {"anew": known}, **again)
        if before + progress.total == len(written(split)):
            stop.set()

    limit.start()
    jobs.archive(once=False, interval=timedelta(milliseconds=100), progress=told, stop=stop)
    limit.cancel()


def test_archive_audit_search_and_restore_across_shard_changes(
    jobs: Jobs, split: Split, world: World
) -> None:
    world.send(names("u", 6), delay=LATER)
    world.cancel(["u5"])
    assert jobs.archive().events == 7, "before the split"
    split.into(4)
    world.send(names("a", 16))
    handle(split, world, settle_some)
    change_meanwhile(split, world, jobs)

    assert archived(jobs) == written(split), "each event of all shards once"
    assert {shard for _, shard, _ in archived(jobs)} > {"", "0of4", "0of3"}
    live = [*names("u", 5), "a0", *names("a", 16)[6:], *names("b", 10)]
    messages = jobs.opened().messages().where("not settled").select("id").collect()
    assert sorted(row.id for row in messages) == sorted(live)
    checked = jobs.audit(jobs.opened)
    assert counted(checked) == {"live": len(live), "acked": 6, "cancelled": 2}
    assert checked.proven, checked.gaps
    for name, states in (("a7", ["retry"]), ("a0", ["acked", "waiting"]), ("b3", ["waiting"])):
        query, server = Query(ids=[name]), jobs.server
        rows = search(jobs.spark, query, archive=jobs.opened(), server=server).collect()
        assert sorted(row.state for row in rows) == states
        assert {row.topic for row in rows} == {"orders"}
    before = seen(split, live)

    jobs.client.flushall()
    assert counted(jobs.restore(jobs.opened())) == {"restored": len(live)}
    assert copies(split) == Counter(dict.fromkeys(live, 1))
    assert split.layout.shards == 3
    after = seen(split, live)
    for name in live:
        was, now = before[name], after[name]
        assert now.envelope[:9] == was.envelope[:9], name
        assert now.waiting_due_ms == was.waiting_due_ms, name
        assert [(one.group, one.failed_attempts) for one in now.group_states] == [
            (one.group, one.failed_attempts) for one in was.group_states
        ], name
    assert counted(jobs.restore(jobs.opened())) == {"live": len(live)}

    jobs.archive(on_gap="record")
    taken: list[str] = []

    def ack_all(one: World, entries: dict[str, Any]) -> None:
        one.ack("lisa", list(entries.values()))
        taken.extend(entries)

    handle(split, world, ack_all)
    assert sorted(taken) == sorted(names("a", 16)[10:]), "what was ready or in flight"
    jobs.archive(on_gap="record")
    last = jobs.audit(jobs.opened)
    assert last.counts["acked"] == 6 + len(taken)
    assert (last.counts["live"], last.missing) == (len(live) - len(taken), 0)
    assert {(gap.topic, gap.shard) for gap in last.gaps} == {
        ("orders", one.partition("~")[2] or None)
        for one in ("orders", *(f"orders~{n}of{count}" for count in (3, 4) for n in range(count)))
    }
    assert len(last.gaps) == 8, "those that came back are told once, and so are the others"


def test_ends_known_only_to_journals_of_shards(jobs: Jobs, split: Split, world: World) -> None:
    """A message that ended after the archive, without tombstone: not missing, not restored."""
    split.into(3)
    world.send(names("a", 9), delay=LATER)
    jobs.archive()
    for name in ("a0", "a1"):
        assert world.producer.cancel("orders", name) == "cancelled"
        shard_name = split.layout.shard_for(ORDERS, name)
        assert split.store.ask("DEL", split.keys(shard_name).done(name)) == 1
    world.send(["new"], delay=LATER)
    checked = jobs.audit(jobs.opened)
    assert (counted(checked), checked.proven) == ({"live": 7, "cancelled": 2}, True)
    result = jobs.restore(jobs.opened())
    assert counted(result) == {"live": 8, "settled": 2}
    assert not result.possibly_lost
    assert copies(split) == Counter(dict.fromkeys(["new", *names("a", 9)[2:]], 1))


def test_rows_are_sent_to_all_shards_and_read_as_one_topic(jobs: Jobs, split: Split) -> None:
    given = {"url": split.url, "topic": "orders", "dedupe_for": "2d"}
    for shards, accepted in ((4, 0), (3, 60)):
        split.into(shards)
        rows = jobs.spark.range(0, 60 + accepted, 1, 2).selectExpr(
            "cast(id AS string) AS id",
            "concat('body ', id) AS body",
            f"timestamp_millis({DUE_MS}) AS due",
        )
        with unwrapped():
            rows.write.format("lisa").options(**given).mode("append").save()
        for shard_name in split.layout.current(ORDERS):
            assert split.store.drive(split.store.options(shard_name)).dedupe_for.days == 2
    assert split.copies() == sorted(map(str, range(120)))
    assert len(split.waiting()) == 7, "each shard of both layouts has some"
    found = jobs.spark.read.format("lisa").option("url", split.url).load()
    assert {(row.topic, row.id) for row in found.select("topic", "id").collect()} == {
        ("orders", str(n)) for n in range(120)
    }
    told = {row.shard for row in found.select("shard").distinct().collect()}
    assert told == {f"{n}of{count}" for count in (3, 4) for n in range(count)}
    one: Any = found.where("id = '7'").select("topic", "body").collect()
    assert [(row.topic, bytes(row.body)) for row in one] == [("orders", b"body 7")]
    seen = split.store.drive(known(split.store, "orders", ["7", "119", "absent"]))
    assert set(seen) == {"7", "119"}


def known_archive(offsets: dict[str, tuple[str, int]], *gaps: ArchiveGap) -> Any:
    """An archive that knows only offsets and gaps, and counts how often they are read."""
    record = TopicRecord({"journal": "1"}, ("lisa",))
    topics = {topic_of(shard_name): record for shard_name in offsets}
    return Mock(
        **{
            "offsets.return_value": offsets,
            "gaps.return_value": list(gaps),
            "topics.return_value": topics,
        }
    )


def lost(shard_name: str, entry: str, number: int) -> ArchiveGap:
    """A recorded gap after an event."""
    at = datetime.fromtimestamp(entry_number(entry)[0] / 1000, UTC)
    span = (entry, number, None, None)
    return ArchiveGap(topic_of(shard_name), *span, "came back empty", at, shard_suffix(shard_name))


def test_remainders_of_many_topics_need_one_listing(split: Split, client: redis.Redis) -> None:
    """The list of all shards may be long, so it is read once, as is the archive."""
    names = [f"t{number}" for number in range(5)]
    offsets: dict[str, tuple[str, int]] = {}
    for name in names:
        options = {"journal": True, "shards": 2}
        split.store.drive(topics.set_options(split.store, name, options))
        for shard_name in split.store.drive(split.store.layout(Topic(name))).current(Topic(name)):
            Journal(client, shard_name).write(2)
            events: Any = client.xrange(split.keys(shard_name).events)
            offsets[shard_name] = (events[0][0].decode(), 1)
    archive = known_archive(offsets)
    client.config_resetstat()

    remainders, groups = prepare(split.store, archive, None, dry_run=True)

    commands: Any = client.info("commandstats")
    assert commands["cmdstat_zrange"]["calls"] == 1
    assert archive.gaps.call_count == 1
    assert archive.offsets.call_count <= 2
    assert [one.journal for one in remainders] == sorted(offsets)
    assert all(one.whole and one.last_number == 2 for one in remainders)
    assert list(groups) == names
    assert split.store.drive(find_remainders(split.store, archive, [])) == []


def test_a_sharded_topic_whose_shards_were_all_lost(split: Split) -> None:
    """Without a journal of its own, the losses of its shards do not start at the beginning."""
    shard_names = [f"orders~{number}of4" for number in range(4)]
    offset = (f"{LOST_MS}-0", 3)
    gaps = [lost(shard_name, *offset) for shard_name in shard_names]
    whole = known_archive(dict.fromkeys(shard_names, offset), *gaps)

    def remainders(archive: Archive) -> list[tuple[str, bool, int | None]]:
        seen = split.store.drive(find_remainders(split.store, archive, ["orders"]))
        return [(one.journal, one.whole, one.archived_ms) for one in seen]

    assert remainders(whole) == [(name, False, LOST_MS) for name in shard_names]
    # A topic without journals uses its own.
    assert remainders(known_archive({})) == [("orders", False, None)]
    _, groups = prepare(split.store, whole, ["orders"], dry_run=False)
    assert groups == {"orders": ("lisa",)}
    assert split.store.drive(split.store.groups("orders")) == ("lisa",)


def test_an_end_in_a_journal_archived_less_far_than_the_next_life(
    jobs: Jobs, split: Split, world: World
) -> None:
    world.send(["ends", "gone"])
    world.promote()
    taken = {entry.id: entry for entry in world.take("lisa", 2)}
    behind = jobs.frozen()
    world.ack("lisa", [taken["ends"]])
    for key in (KEYS.done("ends"), KEYS.body("gone")):  # expired, and deleted by hand
        assert split.store.ask("DEL", key) == 1
    layout = split.into(4)
    world.send(["ends", "gone"], delay=LATER)
    ahead = jobs.frozen(*sorted({layout.shard_for(ORDERS, one) for one in ("ends", "gone")}))
    events = behind.events.unionByName(ahead.events)
    archive: Any = ArchiveSnapshot(events, behind.committed | ahead.committed, behind.records)
    checked = jobs.audit(archive)
    assert counted(checked) == {"live": 2, "acked": 1, "missing": 1}
    assert [row["id"] for row in checked.first["missing"]] == ["gone"]
    offline = jobs.audit(archive, offline=True)
    assert (offline.counts["live"], offline.missing) == (2, 2)


def test_messages_in_shards_of_a_lost_layout_are_not_restored(
    jobs: Jobs, split: Split, world: World
) -> None:
    """Only the server with the topic's own keys came back empty."""
    layout, ids = split.into(2), names("a", 8)
    world.send(ids, delay=LATER)
    archive = jobs.frozen(*layout.current(ORDERS))
    assert world.producer.cancel("orders", "a7") == "cancelled"
    options = {"journal": "1", "retry_delays": "3600000", "shards": "2"}
    archive.records = {"orders": TopicRecord(options, ("lisa",))}
    own = split.store.ask("KEYS", f"{KEYS.options.rpartition(':')[0]}:*")
    assert split.store.ask("DEL", *own)
    assert not split.layout.is_split

    told = {"live": 7, "settled": 1}
    assert counted(jobs.restore(archive, dry_run=True)) == told
    assert not split.layout.is_split
    assert counted(jobs.restore(archive)) == told
    assert split.layout.shards == 2
    assert split.copies() == ids[:7]
    assert split.store.drive(split.store.groups("orders")) == ("lisa",)


def test_the_stream_continues_across_changes_of_the_shard_count(jobs: Jobs, split: Split) -> None:
    split.store.drive(topics.set_options(split.store, "orders", {"journal": True}))
    options: Any = {"archive": "cold", "max_events_per_batch": 20, "topic": "orders"}
    following = Following(jobs.spark, split.url, jobs.folder, **options)
    rows: list[Row] = []
    for turn, count in enumerate((1, 4, 3, 1), 1):
        split.into(count)
        for name in names(f"{turn}-", 12):
            jobs.producer.send("orders", name, id=name, delay=LATER)
        jobs.producer.cancel("orders", f"{turn}-0")
        rows += following.run()
        assert len(rows) == 13 * turn
    assert sorted((row.topic, row.shard or "", row.number) for row in rows) == written(split)
    assert {row.shard for row in rows} > {None, "0of4", "2of3"}
    # Spark commits a batch to the source when the next one starts.
    for shard_name in set(split.layout.counted(ORDERS)) - {"orders"}:
        last: Any = split.store.ask("HGET", split.keys(shard_name).stats, "journaled")
        told = split.store.ask("HGET", split.keys(shard_name).archived, "cold")
        assert told.split()[1] == last, shard_name


def test_a_checkpoint_from_before_sharding_continues(jobs: Jobs) -> None:
    whole, shard = Journal(jobs.client), Journal(jobs.client, "orders~1of2")
    whole.write(5)
    following = Following(jobs.spark, jobs.url, jobs.folder)
    assert len(following.run()) == 5
    [offset] = (jobs.folder / "checkpoint" / "offsets").glob("0")
    assert json.loads(offset.read_text().splitlines()[-1])["orders"].keys() >= {"id", "n"}
    shard.write(4)
    whole.write(1)
    assert {(row.topic, row.shard, row.number) for row in following.run()} == {
        ("orders", None, 6),
        *(("orders", "1of2", number) for number in range(1, 5)),
    }


def test_gaps_are_reported_per_journal(jobs: Jobs) -> None:
    first, second = (Journal(jobs.client, f"orders~{n}of2") for n in range(2))
    following = Following(jobs.spark, jobs.url, jobs.folder)
    first.write(10)
    assert len(following.run()) == 10
    first.write(5)
    second.write(6)
    jobs.client.xtrim(second.keys.events, maxlen=2, approximate=False)
    told = "topic 'orders', shard 1of2, lacks events 1 to 4: after 0-0"
    with pytest.raises(Exception, match=told):
        following.run()
    following.change(fail_on_gap="false")
    rows = following.run()
    gap, *events = sorted(rows, key=lambda row: (row.state != "gap", row.shard, row.number))
    assert (gap.topic, gap.shard, gap.number, gap.state) == ("orders", "1of2", 1, "gap")
    assert [(row.topic, row.shard, row.number) for row in events] == [
        *(("orders", "0of2", n) for n in range(11, 16)),
        *(("orders", "1of2", n) for n in (5, 6)),
    ]
    jobs.client.flushall()
    for journal in (first, second):
        Journal(jobs.client, journal.topic).write(1)
    rows = following.run()
    assert sorted((row.shard, row.state, row.number) for row in rows) == [
        ("0of2", "gap", 16),
        ("0of2", "ready", 1),
        ("1of2", "gap", 7),
        ("1of2", "ready", 1),
    ]


SHARD_NAMES = [f"orders~{number}of8" for number in range(8)]


def mark(journal: Journal, number: int) -> Mark:
    entries: Any = journal.client.xrange(journal.keys.events)
    [entry] = [entry for entry, fields in entries if int(fields[b"n"]) == number]
    return Mark(entry.decode(), number)


def report(split: Split, name: str, journal: Journal, number: int) -> None:
    split.store.drive(record_archived(split.store, name, {journal.topic: mark(journal, number)}))


def prune(split: Split, *journals: Journal) -> list[int]:
    """Run one round of the manager; returns the number of events left."""
    pruner = Pruner(split.store)
    for shard_name in pruner.pick([Shard(journal.topic) for journal in journals]):
        pruner.step(shard_name)
    return [journal.client.xlen(journal.keys.events) for journal in journals]


class TestTrimming:
    """The journal of a shard for which an archive has not reported progress yet."""

    @pytest.fixture
    def journals(self, split: Split, client: redis.Redis) -> Iterator[list[Journal]]:
        """That of the topic, with ten events, and those of two shards, with twenty each."""
        client.config_set("stream-node-max-entries", 1)  # journals are trimmed exactly
        whole = Journal(client)
        whole.write(10)
        layout = split.into(2)
        made = [Journal(client, shard_name) for shard_name in layout.current(ORDERS)]
        for journal in made:
            journal.write(20)
            client.hset(journal.keys.options, "journal_max", 5)
        yield [whole, *made]
        client.config_set("stream-node-max-entries", 100)

    def test_journals_wait_for_the_slower_of_two_archives(
        self, split: Split, journals: list[Journal]
    ) -> None:
        whole, first, _ = journals
        for name in ("continuous", "nightly"):
            report(split, name, whole, 10)
        report(split, "continuous", first, 20)
        assert prune(split, *journals) == [1, 20, 20]
        report(split, "nightly", first, 15)
        assert prune(split, *journals) == [1, 6, 20]
        for name in ("continuous", "nightly"):
            assert split.store.drive(forget(split.store, "orders", name))
        assert prune(split, *journals) == [1, 5, 5]

    def test_journals_do_not_wait_for_silent_archives(
        self, split: Split, journals: list[Journal]
    ) -> None:
        whole, first, _ = journals
        now_ms = split.store.drive(split.store.server_time_ms())
        gone_ms = now_ms - ARCHIVE_HOLDS_MS - 1
        for name, record in (("dead", f"1-1 10 {gone_ms}"), ("~trimmed", f"9 {now_ms}")):
            whole.client.hset(whole.keys.archived, name, record)
        report(split, "continuous", whole, 10)
        assert prune(split, *journals) == [1, 20, 20], "the only archive has not read them"
        report(split, "continuous", first, 20)
        assert prune(split, *journals) == [1, 1, 20]


class TestStartPositions:
    """`JournalReader`, called as Spark calls it."""

    @pytest.fixture
    def trimmed(self, client: redis.Redis, split: Split) -> list[Journal]:
        """Eight shards with events 11 to 30 only."""
        split.into(8)
        made = [Journal(client, shard_name) for shard_name in SHARD_NAMES]
        for journal in made:
            journal.write(30)
            client.xtrim(journal.keys.events, maxlen=20, approximate=False)
        return made

    @pytest.fixture
    def reader(self, split: Split) -> Iterator[JournalReader]:
        reader = JournalReader({"url": split.url, "archive": "cold"}, EVENT_SCHEMA)
        yield reader
        reader.stop()

    def test_a_journal_without_events_in_the_first_batch(
        self, trimmed: list[Journal], reader: JournalReader
    ) -> None:
        offset: dict[str, Any] = {}
        read = {journal.topic: 10 for journal in trimmed}
        for _ in range(100):
            end = reader.latestOffset(offset, ReadMaxRows(5))
            if end == offset:
                break
            tasks = reader.partitions(offset, end)
            pieces = [
                one for task in tasks if isinstance(task, JournalBundle) for one in task.ranges
            ]
            assert 1 <= sum(one.end.number - one.begin.number for one in pieces) <= 5
            for one in pieces:
                assert (one.gap, one.begin.number) == (None, read[one.journal])
                read[one.journal] = one.end.number
            offset = end
            reader.commit(offset)
        assert set(read.values()) == {30}

    def test_a_new_checkpoint_of_an_archive_with_other_journals(
        self, split: Split, trimmed: list[Journal], reader: JournalReader
    ) -> None:
        report(split, "cold", trimmed[0], 20)
        told = "shard 1of8, lacks events 1 to 10: after 0-0"
        with pytest.raises(LisaError, match=told):
            reader.latestOffset({}, ReadMaxRows(1000))
        latest = JournalReader(
            {"url": split.url, "archive": "cold", "starting": "latest"}, EVENT_SCHEMA
        )
        assert [one["n"] for one in latest.initialOffset().values()] == [20, *[0] * 7]
        latest.stop()

    def test_an_archive_that_stopped_before_every_journal_had_a_batch(
        self, trimmed: list[Journal], jobs: Jobs
    ) -> None:
        """The checkpoint has journals without archived events, and still matches the archive."""
        stop = threading.Event()

        def second(done: Progress) -> None:
            if done.batch == 1:
                stop.set()

        first = jobs.archive(max_events=2, progress=second, stop=stop)
        assert len(first.offsets) < len(trimmed)
        jobs.archive()
        assert archived(jobs) == [
            ("orders", f"{shard}of8", number) for shard in range(8) for number in range(11, 31)
        ]
