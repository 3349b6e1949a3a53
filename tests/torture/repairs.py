"""Findings of `fsck --repair` during a run: each must be damage done by another program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.torture.plan import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.torture.case import Case

LEAVES = {
    "trim": {"entry-lost", "pending-lost"},
    "delete-bodies": {"no-body", "leftover"},
    "delete-consumer": {"entry-lost"},
    "destroy-group": {"entry-lost", "no-stream"},
}
"""By kind of damage: the kinds of findings that it may cause."""

assert set(LEAVES) == set(FOREIGN)


class Repair(NamedTuple):
    """One repaired topic: its findings by kind, and some of them in words."""

    topic: str
    began: int
    ended: int
    kinds: Mapping[str, int]
    found: list[str]


def repairs(case: Case) -> None:
    """Any other finding is damage that Lisa did itself."""
    events = [one for one in case.run.events if "skipped" not in one]
    damages = [one for one in events if one["event"] == "fault" and one["kind"] in FOREIGN]
    for repair in _repairs(events):
        allowed = set().union(
            *[LEAVES[one["kind"]] for one in damages if _may_stand(case, one, repair)]
        )
        for kind, n in repair.kinds.items():
            if kind not in allowed:
                some = "; ".join(one for one in repair.found if one.startswith(kind))
                what = f"fsck in the run: {n} {kind} in {repair.topic} {some}".rstrip()
                case.verdicts.accuse("unexplained", 0, what)


def _repairs(events: list[dict[str, Any]]) -> Iterator[Repair]:
    for one in events:
        if one["event"] == "fault" and "repaired" in one:
            topic = one["target"].partition("/")[0]
            began = one.get("repairing", one["until"])
            yield Repair(topic, began, one["until"], one["repaired"], one.get("found", []))
        elif one["event"] == "repair":
            for topic, kinds in one["found"].items():
                words = one.get("details", {}).get(topic, [])
                yield Repair(topic, one.get("repairing", one["at"]), one["at"], kinds, words)


def _may_stand(case: Case, damage: dict[str, Any], repair: Repair) -> bool:
    """Whether a damage existed then: done, and not repaired (or its repair was lost)."""
    if damage["target"].partition("/")[0] != repair.topic or damage["since"] > repair.ended:
        return False
    was_repaired = "repaired" in damage and damage["until"] < repair.began
    return not was_repaired or case.causes.loss_of(damage["until"]) is not None
