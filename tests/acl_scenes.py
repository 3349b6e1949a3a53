"""The commands of each role; only the role itself runs within `stage.watched()`."""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import httpx
from click.testing import CliRunner
from sqlalchemy import create_engine

from lisa import Consumer, Defer, Manager, Message, Outgoing, Producer
from lisa.cli.main import main
from lisa.core.metrics import topics as topic_metrics
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.keys import keyed_id
from lisa.core.model.sharding import Shard, Topic
from lisa.core.model.signals import everywhere
from lisa.core.store import presence
from lisa.core.transitions import loader
from lisa.core.transitions.base import LANES
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.groups import Undeclare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.lease import Reclaim, Renew
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Fail, Failure
from lisa.manager.pruner import Pruner
from lisa.manager.sharder import Sharder
from lisa.outbox import Outbox, Relay, Tables
from lisa.producer import flows
from tests.acl_stage import KEYS, Stage
from tests.gateway.push_targets import Target
from tests.gateways import Gateway
from tests.roles import Cast, Services
from tests.rows import Item, enqueue
from tests.servers import wait_until

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
NOW = timedelta(0)


def park(stage: Stage) -> Cast:
    """A topic with one ready message, and two that wait for it in their lane."""
    laned = stage.cast("laned").declare(key_concurrency="1")
    for number in range(3):
        laned.send(number, message_id=keyed_id("k", f"l{number}"))
    laned.store.call(Promote("laned"))
    return laned


def ignored(topic: str, **about: object) -> None:
    """A signal receiver: announcing a message requires reading its body."""


def produce(stage: Stage) -> None:
    """Send in every way, cancel, inspect."""
    g, h = stage.cast().declare(journal="1"), stage.cast(group="h").declare()
    stage.cast("limited").declare(capacity="2")
    with stage.watched(), Producer(stage.url) as producer:
        producer.send("orders", "now", id="r", ttl=MINUTE)
        producer.send("orders", "now", id="s")
        producer.send("orders", "later", delay=MINUTE, id="w", ttl=MINUTE, retry="0,0,2m")
        producer.send("orders", "again", id="w", delay=MINUTE, on_duplicate="replace")
        producer.send_many("orders", [Outgoing(i, id=f"m{i}") for i in range(30)], delay=MINUTE)
        assert found(producer, "r") == "ready"
        assert producer.reschedule("orders", "w", delay=2 * MINUTE) == "rescheduled"
        assert producer.fire_now("orders", "w") == "rescheduled"
        assert producer.schedule("tick", topic="orders", body=1, every="1h", retry="0", ttl=MINUTE)
        assert [one.name for one in producer.schedules("orders")] == ["tick"]
        assert producer.run_schedule("orders", "tick")
        assert producer.remove_schedule("orders", "tick")
        assert producer.cancel("orders", "m1") == "cancelled"
        producer.send("orders", "keyed", key="k", delay=MINUTE)
        assert producer.reschedule_key("orders", "k", shift="1m")[0].outcome == "rescheduled"
        assert len(producer.list_key("orders", "k")) == len(producer.cancel_key("orders", "k"))
        producer.send("orders", "anew", id="m1", delay=MINUTE, on_duplicate="replace")
        producer.send("limited", "x", delay=MINUTE)
        for key in ("k", "l", "k"):
            producer.send("coalesced", "x", key=key, throttle=MINUTE)
        with (
            mock.patch.object(flows, "REGISTER_EVERY_S", 0.0),
            mock.patch.object(presence, "OVERDUE", timedelta(0)),
        ):
            producer.send("overdue", "x", delay=timedelta(milliseconds=1))
            time.sleep(0.002)
            producer.send("overdue", "y", delay=MINUTE)  # no manager runs
            wait_until(lambda: not producer._watch.running)
    for cast in (g, h):
        entry = cast.take(1)[0]
        failure = Failure(entry.id, entry.entry, "no", 0)
        cast.store.call(Fail("orders", cast.group, [failure]))
        cast.take(1)
    with stage.watched(), Producer(stage.url) as producer:
        Cast(stage.url).store.call(Inspect("orders", ["r", "s"]))  # several bodies
        assert found(producer, "r") == "retry"
        assert found(producer, "s") == "in_flight"
        assert producer.reschedule("orders", "r", delay=MINUTE) == "rescheduled"
        assert producer.cancel("orders", "s") == "in_flight"
        producer.send("orders", "again", id="s", delay=MINUTE, on_duplicate="replace")
        assert producer.cancel("orders", "w") == "cancelled"
    g.send(message_id="lost", delay_ms=60_000)
    stage.admin.delete(g.own.ready)  # another program deleted it: the group is declared again
    stage.admin.hset(g.own.entries, "lost", "1-1")
    stage.admin.zrem(g.keys.waiting, "lost")
    with stage.watched(), Producer(stage.url) as producer:
        producer.cancel("orders", "lost")


def found(producer: Producer, message_id: str) -> str | None:
    """The state of one of `orders`."""
    message = producer.get("orders", message_id)
    return None if message is None else message.state


def manage(stage: Stage) -> None:
    """Run every service, and a whole manager with its metrics and announcements."""
    casts = [
        stage.cast().declare(
            ack_timeout="1", retry_delays="0", journal="1", journal_max="1", garbage_keep="1"
        ),
        stage.cast(group="h").declare(),
    ]
    cast = casts[0]
    for message_id in ("dead", "held", "entry-lost", "ready"):
        cast.send(message_id=message_id)
    for one in casts:
        one.discard(one.take(1)[0])
        one.take(1)
    (lost, *_) = cast.take(1)
    stage.admin.xdel(cast.own.ready, lost.entry)
    cast.send_due(ttl_ms=1, message_id="expired")
    cast.send_due(message_id="due")
    cast.send(message_id="later", delay_ms=60_000)
    stage.admin.hset(cast.keys.consumers, "gone", "{}")
    for number in range(200):
        stage.admin.xadd(cast.keys.events, {"n": str(number)})
    stage.ask("XGROUP", "CREATECONSUMER", cast.own.ready, "g", "idle")
    half = stage.cast("half").declare()
    half.send()
    half.store.call(Undeclare("half", half.group))
    half.configure(**{f"removing:{half.group}": "1"})
    stage.admin.zadd(KEYS.topics, {"forgotten": 1})
    stage.admin.hset(KEYS.topic("left").options, "layout", "2:1::2")
    for shard in ("left~0of2", "left~1of2"):
        stage.admin.hset(KEYS.topic(shard).stats, mapping={"sent": 1, "journaled": 1})
        stage.admin.xadd(KEYS.topic(shard).history, {"sent": 1}, id="60000-0")
    time.sleep(0.05)
    with (
        stage.watched(),
        mock.patch.object(presence, "GONE_AFTER_MS", 0),
        everywhere.retrying.connected_to(ignored),
        everywhere.dead.connected_to(ignored),
        everywhere.expired.connected_to(ignored),
    ):
        mine = Cast(stage.url)
        mine.store.drive(mine.store.check_schema())
        kit = Services(mine)
        mine.store.drive(mine.store.groups("orders"))
        mine.store.drive(mine.store.run_many([Reclaim("orders", "removed")]))
        mine.store.call(Renew("orders", "h", 1, mine.now_ms() + 60_000))
        mine.store.call(Inspect("orders", ["due", "ready"]))
        kit.reclaimer.step(["orders"])
        kit.promoter.step(["orders", "forgotten"])
        kit.trimmer.step("orders")
        kit.sweeper.step("orders")
        kit.sweeper.step("forgotten")
        kit.sweeper.step("half")
        kit.sweeper.managers()
        kit.sampler.step("orders", kit.clock.now_ms() // 3_600_000 * 3_600_000)
        # Occurrences of topics with several shards.
        for token, on_duplicate in (("A" * 8, OnDuplicate.KEEP), ("B" * 8, OnDuplicate.REPLACE)):
            item = Item("tick@5", "+60000", encode_envelope(token, 1))
            mine.store.call(enqueue("orders", token, [item], on_duplicate))
            mine.store.call(Cancel("orders", ["tick@5"]))
        Pruner(mine.store).step(Shard("orders"))
        Sharder(mine.store).step(Topic("left"))
    with stage.watched():
        manager = Manager(
            stage.url,
            topics={"configured": {"journal": True, "group": "g"}},
            http="127.0.0.1:0",
            sweep=timedelta(seconds=1),
            clean=timedelta(seconds=1),
        )
        with manager:
            wait_until(lambda: manager.health()["status"] == "ok")
            page = httpx.get(f"http://127.0.0.1:{manager.status_port}/metrics", timeout=30)
            assert "lisa_" in page.text
            wait_until(lambda: not stage.unused())


def consume(stage: Stage) -> None:
    """Handle, fail, batch, extend, release, pull."""
    cast = stage.cast().declare(retry_delays="0", journal="1", ack_timeout="600")
    pulled = stage.cast("pulled").declare(journal="1")
    pulled.on("pulled", "h").declare()
    cast.configure(ack_timeout="600")
    for number in range(12):
        cast.send(number, message_id=f"m{number}", ttl_ms=60_000)
    stage.admin.xadd(cast.own.ready, {"id": "absent", "due": "1"})
    stage.admin.zadd(pulled.own.retry, {"later": 4_000_000_000_000})
    handled: list[str] = []
    with stage.watched():
        consumer = Consumer(stage.url, group="g", poll_timeout=timedelta(seconds=30))

        @consumer.on("orders")
        def handle(message: Message) -> None:
            handled.append(message.id)
            if message.body == 3:
                raise ValueError("no")
            if message.body == 5:
                raise Defer(delay="1h")
            if message.body == 4:
                time.sleep(0.7)  # its lease is extended meanwhile

        with consumer:
            wait_until(lambda: len(handled) >= 12)
            time.sleep(0.3)
    for number in range(12):
        pulled.send(number, message_id=f"p{number}", ttl_ms=60_000)
    with stage.watched(), Consumer(stage.url, group="g") as consumer:
        found = consumer.pull("pulled", batch=6, ack_timeout=MINUTE)
        assert found[0].extend()
        assert found[0].ack() == "acked"
        found[1].retry(delay=timedelta(0))
        found[2].discard("no")
        assert found[3].release()
        assert found[4].defer(delay="1h") == "deferred"
        assert consumer.pull("pulled", batch=9)
        assert consumer.pull("orders", wait=timedelta(seconds=1)) == []
        assert consumer.pull("joined") == [], "it declares its group, which is new"
    laned = park(stage)
    laned.configure(rate="100,1000,100")  # the next ack looks at all lanes
    closed = laned.store.keys.topic("laned").lanes(laned.group).closed
    stage.admin.zadd(closed, {"k": 1})  # a lane that has opened since
    with stage.watched(), Consumer(stage.url, group="g") as consumer:
        for _ in range(3):
            assert consumer.pull("laned")[0].ack() == "acked"
    with stage.watched():  # a topic without a group, which the consumer declares
        consumer = Consumer(stage.url)
        consumer.subscribe("fresh", lambda _: None)
        with consumer:
            time.sleep(0.3)


def look(stage: Stage) -> None:
    """Read everything, change nothing."""
    cast = stage.cast().declare(journal="1")
    for number in range(6):
        cast.send({"n": number}, message_id=f"m{number}")
    for entry in cast.take(2):
        cast.discard(entry)
    cast.take(1)
    cast.send(delay_ms=60_000, message_id="later")
    park(stage)
    with stage.watched(is_new=False):
        for features in (loader.NONE, frozenset({LANES})):  # as other roles do
            stage.ask("SCRIPT", "LOAD", loader.load("inspect", features).source)
        browse(lisa_of(stage))
        mine = Cast(stage.url)
        mine.store.call(Inspect("orders", ["m1", "m4"]))
        mine.store.drive(topic_metrics.read(mine.store))


def browse(lisa: Callable[..., str]) -> None:
    """Read what an operator sees."""
    for one in ("m1", "m4", "later", "nowhere"):
        lisa("get", "orders", one, ok=(0, 1))
    lisa("why", "laned", "l1", "--key", "k")
    for state in ("waiting", "ready", "in_flight", "retry", "garbage"):
        found = json.loads(lisa("list", "orders", "--state", state, "--limit", "1", "--json"))
        if found.get("cursor"):
            lisa("list", "orders", "--state", state, "--cursor", found["cursor"])
    lisa("topics")
    lisa("topic", "show", "orders")
    lisa("topic", "group", "list", "orders")
    lisa("topic", "journal", "show", "orders")
    lisa("consumers")
    lisa("managers")
    lisa("top", "--once", "--interval", "0.1")
    lisa("garbage", "list", "orders", "--limit", "1")
    lisa("garbage", "show", "orders", "m1", ok=(0, 1))


def lisa_of(stage: Stage) -> Callable[..., str]:
    """The command line as the stage's user; `ok` lists the accepted exit codes."""

    def lisa(*arguments: str, ok: tuple[int, ...] = (0,), stdin: str = "") -> str:
        result = CliRunner(env={"LISA_REDIS_URL": stage.url}).invoke(main, arguments, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in ok, (arguments, result.output)
        return result.stdout

    return lisa


def operate(stage: Stage) -> None:
    """Run every command of the command line."""
    cast = stage.cast().declare(retry_delays="0", journal="1")
    other = stage.cast(group="h").declare()
    for number in range(8):
        cast.send({"n": number}, message_id=f"m{number}", ttl_ms=60_000)
    for one in (cast, other):
        for entry in one.take(3):
            one.discard(entry)
        one.take(1)
    cast.send(delay_ms=60_000, message_id="late")
    stage.admin.hset(cast.own.entries, "foreign", "1-1")
    stage.admin.zadd(cast.own.retry, {"foreign2": 1})
    stage.admin.xadd(cast.own.ready, {"id": "absent", "due": "1"})
    stage.admin.hset("lisa:{lost}:g:x:entries", "foreign", "1-1")
    stage.admin.zadd("lisa:{unknown}:waiting", {"x": 1})
    stage.admin.zadd(other.own.retry, {"late": 1})
    cast.store.drive(
        presence.announce_consumer(
            cast.store, presence.ConsumerPresence(name="c1", topic="orders", group="g")
        )
    )

    park(stage)
    lisa = lisa_of(stage)
    with stage.watched():
        lisa("send", "orders", "x", "--id", "x", "--delay", "1h")
        lisa("send", "orders", "--file", "-", stdin='{"body": 1}\n{"body": 2}\n')
        browse(lisa)
        lisa("cancel", "orders", "m7")
        lisa("send", "orders", "y", "--id", "m7", "--on-duplicate", "replace")
        lisa("reschedule", "orders", "x", "--delay", "2h")
        lisa("fire", "orders", "x")
        lisa("cancel", "orders", "x", "late", ok=(0, 1))
        lisa("send", "orders", "x", "--key", "k", "--delay", "1h")
        lisa("key", "reschedule", "orders", "k", "--shift", "-5m")
        lisa("key", "list", "orders", "k")
        lisa("key", "cancel", "orders", "k")
        lisa("topic", "set", "orders", "retention=5m")
        lisa("topic", "pause", "orders")
        lisa("topic", "resume", "orders")
        lisa("topic", "journal", "show", "orders")
        lisa("topic", "journal", "forget", "orders", "old", "--yes", ok=(0, 1, 2))
        lisa("topic", "group", "add", "orders", "third")
        lisa("topic", "group", "remove", "orders", "third", "--yes")
        lisa("topic", "push", "orders", "https://shop.example/hook", "--group", "h", ok=(0, 1, 2))
        lisa("garbage", "requeue", "orders", "--group", "g", "--all")
        lisa("garbage", "purge", "orders", "--group", "h", "--all", "--yes")
        lisa("fsck", ok=(0, 1))
        lisa("fsck", "--repair", ok=(0, 1))
        lisa("doctor", ok=(0, 1))
        lisa("topic", "group", "remove", "orders", "h", "--yes")
        lisa("send", "passing", "x", "--delay", "1m")
        lisa("topic", "delete", "passing", "--yes")


PUSHES = """
lisa-delay-queue:
  gateway-server:
    push-allow: ["127.0.0.0/8"]
"""


SEND = """
POST /v1/topics/orders/messages {"body": 1, "id": "a", "delay_ms": 60000}
POST /v1/topics/orders/messages:batch {"messages": [{"body": 1, "id": "b"}, {"body": 2}]}
POST /v1/topics/limited/messages {"body": 1, "delay_ms": 60000}
GET /v1/topics/orders/messages/a /v1/topics/orders/messages/m0 /v1/topics/orders/messages/later
PATCH /v1/topics/orders/messages/a {"delay_ms": 90000}
POST /v1/topics/orders/messages/a/fire {}
DELETE /v1/topics/orders/messages/a
POST /v1/topics/orders/messages {"body": 1, "id": "a", "on_duplicate": "replace"}
"""
OPERATE = """
GET /v1/topics/orders/garbage?group=g&reason=no
POST /v1/topics/orders/garbage:requeue {"group": "g", "ids": ["m1"]}
POST /v1/topics/orders/garbage:purge {"group": "g", "all": true}
POST /v1/topics/orders/garbage:purge {"group": "h", "all": true}
GET /v1/topics/orders /v1/topics/orders/options /v1/topics/orders/groups
GET /v1/topics /v1/consumers /v1/managers /metrics /healthz
PATCH /v1/topics/orders/options {"retention": "5m"}
POST /v1/topics/orders/pause {}
POST /v1/topics/orders/resume {}
GET /v1/topics/laned/messages/k%1Fl1/why
GET / /consumers /managers /topics/orders /topics/orders?ahead=minutes /topics/orders/messages
GET /topics/orders/garbage /topics/orders/garbage?group=h&reason=no&kind=no
GET /topics/orders/messages/m4 /search?q=m4 /search?q=m&in=id /search?q=m&in=text
DELETE /v1/topics/orders/groups/h
PUT /v1/topics/orders/schedules/daily {"body": 1, "cron": "@daily"}
GET /v1/topics/orders/schedules /v1/topics/orders/schedules/daily
GET /v1/topics/orders/schedules/daily/next /topics/orders/schedules
GET /topics/orders/schedule?name=daily /topics/orders/schedule/edit?name=daily
POST /v1/topics/orders/schedules/daily/pause {}
POST /v1/topics/orders/schedules/daily/resume {}
POST /v1/topics/orders/schedules/daily/run {}
POST /v1/topics/orders/schedules/daily/backfill {"from_ms": 1760000000000, "to_ms": 1760086400000}
DELETE /v1/topics/orders/schedules/daily
POST /v1/topics/passing/messages {"body": 1, "delay_ms": 60000}
DELETE /v1/topics/passing?confirm=passing
"""
"""Requests that succeed: each line has a method and paths, or one path and a body."""

ORDERS = "/v1/topics/orders"
POLL = "/v1/topics/poll"


def serve(stage: Stage) -> None:
    """Use the HTTP API, the compatible APIs, the page, a push, and the metrics."""
    cast = stage.cast().declare(retry_delays="0", journal="1")
    other = stage.cast(group="h").declare()
    for number in range(9):
        cast.send(number, message_id=f"m{number}", ttl_ms=60_000)
    for one in (cast, other):
        for entry in one.take(3):
            one.discard(entry)
    cast.send(message_id="later", delay_ms=60_000)
    stage.cast("limited").declare(capacity="2")
    park(stage)
    with (
        tempfile.TemporaryDirectory() as directory,
        Target() as target,
        stage.watched(),
        Gateway(stage.url, "--allow-actions", config=PUSHES, directory=Path(directory)) as gateway,
    ):
        request_all(gateway, SEND)
        for state in ("waiting", "ready", "in_flight", "retry", "garbage"):
            path = f"{ORDERS}/messages?state={state}&limit=1"
            if cursor := request(gateway, "GET", path).json()["cursor"]:
                request(gateway, "GET", f"{path}&cursor={cursor}")
        deliver_by_http(gateway)
        push_to(gateway, target)
        request_all(gateway, OPERATE)
        with gateway.client.stream("GET", f"{ORDERS}/events") as stream:
            next(stream.iter_lines())


def request(gateway: Gateway, method: str, path: str, body: object = None) -> httpx.Response:
    answer = gateway.client.request(method, path, json=body)
    assert answer.status_code < 400, (method, path, answer.status_code, answer.text)
    return answer


def request_all(gateway: Gateway, requests: str) -> None:
    for line in requests.strip().splitlines():
        method, path, *more = line.split(maxsplit=2)
        if method == "GET":
            for each in (path, *" ".join(more).split()):
                request(gateway, "GET", each)
        else:
            request(gateway, method, path, json.loads(more[0]) if more else None)


def deliver_by_http(gateway: Gateway) -> None:
    """Pull, settle, wait for a message."""
    wanted = {"max": 5, "group": "g", "wait_ms": 100, "ack_timeout_ms": 30_000}
    taken = request(gateway, "POST", f"{ORDERS}/pull", wanted).json()["deliveries"]
    verbs = ("extend", "ack", "retry", "release", "defer")
    for verb, one in zip(verbs, taken, strict=False):
        body = {"receipt": one["receipt"]} | ({"delay_ms": 60_000} if verb == "defer" else {})
        request(gateway, "POST", f"{ORDERS}/messages/{one['id']}/{verb}", body)
    request(gateway, "POST", f"{POLL}/groups", {"group": "g"})
    wait = {"json": {"wait_ms": 20_000}, "timeout": 30}
    poll = threading.Thread(target=httpx.post, args=(f"{gateway.url}{POLL}/pull",), kwargs=wait)
    poll.start()
    time.sleep(0.3)
    request(gateway, "POST", f"{POLL}/messages", {"body": 1})
    poll.join()
    answer = gateway.client.post("/v1/topics/fresh/pull", json={"wait_ms": 50})
    assert answer.status_code in (200, 204, 409), answer.text


def push_to(gateway: Gateway, target: Target) -> None:
    """Have the gateway push messages."""
    request(gateway, "PUT", f"{POLL}/push", {"url": target.url, "group": "g"})
    request(gateway, "POST", f"{POLL}/messages", {"body": "pushed"})
    wait_until(lambda: target.received)
    request(gateway, "GET", f"{POLL}/push")
    request(gateway, "DELETE", f"{POLL}/push?group=g")


def relay(stage: Stage) -> None:
    """Forward every kind of operation, and announce the relay."""
    g = stage.cast().declare(journal="1")
    stage.cast(group="h").declare()
    for message_id in ("held", "taken"):
        g.send(message_id=message_id)
    entry, _ = g.take(2)
    g.store.call(Fail("orders", g.group, [Failure(entry.id, entry.entry, "no", 0)]))
    stage.cast("direct").declare()
    stage.cast("limited").declare(capacity="2")
    damaged = stage.cast("damaged").declare()
    damaged.send(message_id="lost", delay_ms=60_000)
    stage.admin.delete(damaged.own.ready)  # another program deleted it: the group is declared again
    stage.admin.hset(damaged.own.entries, "lost", "1-1")
    stage.admin.zrem(damaged.keys.waiting, "lost")
    with tempfile.TemporaryDirectory() as directory:
        engine, tables, outbox = create_engine(f"sqlite:///{directory}/db"), Tables(), Outbox()
        tables.metadata.create_all(engine)
        with engine.begin() as session:
            for number in range(30):
                outbox.send(session, "orders", number, id=f"m{number}", delay=MINUTE, ttl=HOUR)
            outbox.send(session, "orders", "x", delay=MINUTE, key="k", retry="0,0,2m")
            outbox.send(session, "orders", "x", key="t", throttle=MINUTE)
            outbox.send(session, "orders", "x", at_local="2099-01-01T09:00", tz="Europe/Berlin")
            outbox.send(session, "orders", "x", id="m1", delay=MINUTE, on_duplicate="replace")
            outbox.send(session, "orders", "x", id="taken", delay=MINUTE, on_duplicate="replace")
            outbox.send(session, "direct", "now")
            for message_id in ("m1", "held", "taken"):
                outbox.reschedule(session, "orders", message_id, delay=MINUTE)
            outbox.reschedule(session, "orders", "m2", at_local="2099-01-01T09:00", tz="UTC")
            for message_id in ("m3", "held", "taken"):
                outbox.cancel(session, "orders", message_id)
            outbox.cancel(session, "damaged", "lost")
            outbox.send(session, "limited", "x", delay=MINUTE)
        with stage.watched(), Relay(engine.url, stage.url) as relay:
            wait_until(lambda: relay.done.numbers().get(("cancel", "forwarded"), 0) == 4)
            wait_until(lambda: presence_of_relays(stage))
            Cast(stage.url).store.call(Inspect("orders", ["m1", "m2"]))  # several bodies
        engine.dispose()
        assert presence_of_relays(stage) == []
        assert relay.errors == 0, relay.error


def presence_of_relays(stage: Stage) -> list[presence.RelayPresence]:
    store = Cast(stage.plain).store
    return store.drive(presence.relays(store))


SCENES: dict[str, Callable[[Stage], None]] = {
    "producer": produce,
    "manager": manage,
    "consumer": consume,
    "gateway": serve,
    "operator": operate,
    "reader": look,
    "relay": relay,
}
