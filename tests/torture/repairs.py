"""What `fsck --repair` found in the middle of a run: it must be what a foreign hand had done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.torture.plan import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.torture.case import Case

__all__ = ["repairs"]

LEAVES = {
    "trim": {"entry-lost", "pending-lost"},
    "delete-bodies": {"no-body", "leftover"},
    "delete-consumer": {"entry-lost"},
    "destroy-group": {"entry-lost", "no-stream"},
}
"""By what a foreign hand did: the kinds of findings that it may leave."""

assert set(LEAVES) == set(FOREIGN)


class Repair(NamedTuple):
    """One topic, put right: what was found, by kind, and some of it in words."""

    topic: str
    began: int
    ended: int
    kinds: Mapping[str, int]
    found: list[str]


def repairs(case: Case) -> None:
    """Whatever else is found is damage that Lisa did to itself."""
    events = [one for one in case.run.events if "skipped" not in one]
    damages = [one for one in events if one["event"] == "fault" and one["kind"] in FOREIGN]
    for repair in _repairs(events):
        allowed = set().union(*[LEAVES[one["kind"]] for one in damages
                                if _may_stand(case, one, repair)])  # fmt: skip
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
    """Whether a damage was done by then, and not put right before (or that was lost again)."""
    if damage["target"].partition("/")[0] != repair.topic or damage["since"] > repair.ended:
        return False
    was_repaired = "repaired" in damage and damage["until"] < repair.began
    return not was_repaired or case.causes.loss_of(damage["until"]) is not None
