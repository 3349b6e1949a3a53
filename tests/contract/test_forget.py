"""forget: deletes unused consumer names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.transitions.forget import Forget
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench


def names(bench: Bench) -> set[str]:
    infos = bench.store.ask("XINFO", "CONSUMERS", bench.keys.group("lisa").ready, "lisa")
    return {dict(zip(info[::2], info[1::2], strict=True))[b"name"].decode() for info in infos}


def test_a_name_with_something_pending_is_never_forgotten(bench: Bench) -> None:
    held = G(ready=[Row("a", 1, 1, "busy")])
    bench.put(body={"a": "A-"}, consumers={"busy": "{}", "idle": "{}", "gone": "{}"}, lisa=held)
    ready = bench.keys.group("lisa").ready
    bench.store.ask("XGROUP", "CREATECONSUMER", ready, "lisa", "idle")
    said = bench.call(Forget(TOPIC, "lisa", ["busy", "idle", "gone"], 0))
    assert said == ["idle", "gone"]
    assert names(bench) == {"busy"}
    bench.check(body={"a": "A-"}, consumers={"busy": "{}"}, lisa=held)


def test_a_recently_used_name_is_kept(bench: Bench) -> None:
    bench.put(consumers={"idle": "{}"}, lisa=G())
    bench.store.ask("XGROUP", "CREATECONSUMER", bench.keys.group("lisa").ready, "lisa", "idle")
    assert bench.call(Forget(TOPIC, "lisa", ["idle"], 60_000)) == []
    assert names(bench) == {"idle"}
    bench.check(consumers={"idle": "{}"}, lisa=G())
