"""The report of a run, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.torture.causes import ACK_US, SETTLES_US, Causes, Window, meet
from tests.torture.checker import flatness
from tests.torture.world import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.torture.checker import Finding, Verdicts
    from tests.torture.reading import Run

PERCENTILES = (50, 90, 99, 99.9, 100)
SHOWN = 20
WRITTEN = 10_000


def figures(run: Run, verdicts: Verdicts) -> dict[str, Any]:
    """All measurements, as plain values."""
    faults = [event for event in run.events if event["event"] == "fault"]
    done = [fault for fault in faults if "skipped" not in fault]
    windows = [Window(fault["since"], fault["until"] + SETTLES_US, fault["kind"]) for fault in done]
    begun = next(event for event in run.events if event["event"] == "begin")
    over = run.events[-1]
    return {
        "clean": verdicts.is_clean,
        "options": begun["options"],
        "seconds": (over["at"] - begun["at"]) / 1e6,
        "counts": dict(verdicts.counts),
        "errors": dict(Counter(failure.name for failure in run.failures)),
        "faults": dict(Counter(fault["kind"] for fault in done)),
        "skipped": dict(Counter(fault["kind"] for fault in faults if "skipped" in fault)),
        "half_done": dict(Counter(fault["kind"] for fault in done if "failed" in fault)),
        "lost_replies": over.get("lost_replies", 0),
        "verdicts": {name: _plain(found) for name, found in verdicts.guilty.items()},
        "excused": {name: _plain(found) for name, found in verdicts.excused.items()},
        "handled_again": dict(verdicts.again.most_common()),
        "lateness_ms": lateness(run, windows),
        "redelivery": redelivery(run, windows),
        "second_half": {name: half._asdict() for name, half in flatness(run).items()},
    }


def _plain(found: list[Finding]) -> dict[str, Any]:
    named = [{"message": finding.number, "what": finding.what} for finding in found[:WRITTEN]]
    return {"count": len(found), "named": named}


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
    text = "\n".join(_text(found)) + "\n"
    (out / "report.txt").write_text(text, encoding="utf-8")
    return text


def _text(found: dict[str, Any]) -> list[str]:
    options = found["options"]
    title = (
        f"torture run: {found['seconds']:.0f} s, persistence {options['persistence']}, "
        f"seed {options['seed']}, {options['managers']} managers, {options['program']}"
    )
    lines = [
        title,
        "\nmessages",
        *_table(found["counts"]),
        *_table(found["errors"], "error {}"),
        f"\nfaults: {sum(found['faults'].values())}, replies lost: {found['lost_replies']}",
        *_table(found["faults"]),
        *_table(found["half_done"], "{}, half done"),
        *_table(found["skipped"], "{}, not done"),
        "\nhandled again, and why",
        *_table(found["handled_again"]),
    ]
    for series, unit in (("lateness_ms", "ms"), ("redelivery", "ack timeouts")):
        lines.append(f"\n{series.partition('_')[0]}, {unit}")
        for name, spread in found[series].items():
            said = "  ".join(f"{key} {value:,.6g}" for key, value in spread.items())
            lines.append(f"  {name}: {said}")
    lines.append("\nsecond half: least, mean, most; growth from beginning to end")
    for name, half in found["second_half"].items():
        said = " ".join(f"{half[key]:12,.1f}" for key in ("least", "mean", "most"))
        lines.append(f"  {name:24} {said} {half['growth']:+8.1%}")
    lines.append("")
    for lists, why in ((found["excused"], ", explained by a fault"), (found["verdicts"], "")):
        for name, rows in lists.items():
            lines.append(f"{name}{why}: {rows['count']:,}")
            lines += [f"  {row['message']}  {row['what']}" for row in rows["named"][:SHOWN]]
            lines += ["  ... the others are in report.json"] * (rows["count"] > SHOWN)
    return [*lines, "", "CLEAN" if found["clean"] else "NOT CLEAN"]


def _table(rows: dict[str, Any], title: str = "{}") -> list[str]:
    return [f"  {title.format(name):44} {n:12,}" for name, n in rows.items()]
