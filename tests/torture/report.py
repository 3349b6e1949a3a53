"""The report of a run, for people and for programs."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.torture.causes import ACK_US, SETTLES_US, Causes, Window, meet
from tests.torture.checker import Verdicts, flatness
from tests.torture.reading import Run
from tests.torture.world import Verdict

PERCENTILES = (50, 90, 99, 99.9, 100)
SHOWN = 20
WRITTEN = 10_000


def figures(run: Run, verdicts: Verdicts) -> dict[str, Any]:
    faults = [event for event in run.events if event["event"] == "fault"]
    done = [fault for fault in faults if "skipped" not in fault]
    windows = [Window(fault["since"], fault["until"] + SETTLES_US, fault["kind"]) for fault in done]
    begun = next(event for event in run.events if event["event"] == "begin")
    over = run.events[-1]
    return {
        "options": begun["options"],
        "seconds": (over["at"] - begun["at"]) / 1e6,
        "counts": dict(verdicts.counts),
        "errors": dict(Counter(failure.name for failure in run.failures)),
        "faults": dict(Counter(fault["kind"] for fault in done)),
        "skipped": dict(Counter(fault["kind"] for fault in faults if "skipped" in fault)),
        "half_done": dict(Counter(fault["kind"] for fault in done if "failed" in fault)),
        "lost_replies": over.get("lost_replies", 0),
        "handled_again": dict(verdicts.again.most_common()),
        "lateness_ms": lateness(run, windows),
        "redelivery_in_ack_timeouts": redelivery(run, windows),
        "second_half": flatness(run),
        "excused": {name: found[:WRITTEN] for name, found in verdicts.excused.items()},
        "verdicts": {name: found[:WRITTEN] for name, found in verdicts.guilty.items()},
        "accusations": sum(map(len, verdicts.guilty.values())),
        "clean": verdicts.is_clean,
    }


def lateness(run: Run, windows: list[Window]) -> dict[str, dict[str, float]]:
    """Time from due to first handling, in ms: handlings affected by a fault, and the others."""
    rows = run.handled[run.handled.attempt == 1]
    due = rows.due * 1000
    late = (rows.begin - due) / 1000
    inside = meet(windows, due, rows.begin)
    return {"outside faults": _spread(late[~inside]), "inside faults": _spread(late[inside])}


def _spread(values: NDArray[Any]) -> dict[str, float]:
    found = {"messages": float(len(values))}
    if len(values):
        for share, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
            found["max" if share == 100 else f"p{share:g}"] = round(float(value), 3)
    return found


def redelivery(run: Run, windows: list[Window]) -> dict[str, dict[str, float]]:
    """From a handler's kill -9 to the next handling of its messages, in ack timeouts.

    `alone`: there was no other fault meanwhile.
    """
    kills, rows = Causes(run.events, run.stalls).kills, run.handled
    alone, every = [], []
    for row in np.nonzero((rows.end[:-1] == 0) & (rows.verdict[:-1] == Verdict.BEGUN))[0]:
        this, after = rows[row], rows[row + 1]
        killed = kills.get(int(this.process))
        is_same = (this.message, this.place) == (after.message, after.place)
        if killed is None or not is_same or after.begin < killed:
            continue  # or it had lost the message before it was killed
        every.append((after.begin - killed) / ACK_US)
        if sum(window.meets(killed, after.begin) for window in windows) == 1:
            alone.append(every[-1])
    return {"alone": _spread(np.array(alone)), "with other faults": _spread(np.array(every))}


def write(found: dict[str, Any], out: Path) -> str:
    """Write `report.json` and `report.txt`; returns the text."""
    (out / "report.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    verdict = "CLEAN" if found["clean"] else "NOT CLEAN"
    text = "\n".join([*_lines(found), "", verdict, ""])
    (out / "report.txt").write_text(text, encoding="utf-8")
    return text


def _lines(found: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Values by name; a few numbers in one line, and the first of many findings."""
    for name, value in found.items():
        title = f"{indent}{name.replace('_', ' ')}"
        if isinstance(value, list) and name != "kinds":
            yield f"{title}: {len(value):,}"
            yield from [f"{indent}  {number}  {what}" for number, what in value[:SHOWN]]
        elif isinstance(value, dict) and indent:
            yield f"{title:30}" + "  ".join(f"{key} {n:,.6g}" for key, n in value.items())
        elif isinstance(value, dict):
            yield f"\n{title}"
            yield from _lines(value, "  ")
        else:
            yield f"{title:46} {value:,}" if isinstance(value, int) else f"{title:46} {value}"
