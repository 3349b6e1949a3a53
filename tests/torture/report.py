"""The report of a run, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.torture.causes import ACK_US, SETTLES_US, Causes, Window, meet
from tests.torture.samples import flatness, under_load
from tests.torture.world import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.torture.reading import Run
    from tests.torture.verdicts import Finding, Verdicts

PERCENTILES = (50, 90, 99, 99.9, 100)
SHOWN = 20
WRITTEN = 10_000


def figures(run: Run, verdicts: Verdicts) -> dict[str, Any]:
    """All measurements, as plain values."""
    faults = [event for event in run.events if event["event"] == "fault"]
    begun = next(one for one in run.events if one["event"] == "begin")
    over = run.events[-1]
    skipped = [one for one in faults if "skipped" in one]
    done = [one for one in faults if "skipped" not in one]
    return {
        "clean": verdicts.is_clean,
        "options": begun["options"],
        "seconds": (over["at"] - begun["at"]) / 1e6,
        "counts": dict(verdicts.counts),
        "errors": run.messages.errors,
        "faults": dict(Counter(one["kind"] for one in done)),
        "skipped": dict(Counter(one["kind"] for one in skipped)),
        "half_done": dict(Counter(one["kind"] for one in done if "failed" in one)),
        "lost_replies": over.get("lost_replies", 0),
        "verdicts": {name: _plain(found) for name, found in verdicts.guilty.items()},
        "excused": {name: _plain(found) for name, found in verdicts.excused.items()},
        "handled_again": dict(verdicts.again.most_common()),
        "lateness_ms": lateness(run, done),
        "redelivery": redelivery(run),
        "second_half": {name: one._asdict() for name, one in flatness(under_load(run)).items()},
    }


def _plain(found: list[Finding]) -> dict[str, Any]:
    named = [{"message": one.number, "what": one.what} for one in found[:WRITTEN]]
    return {"count": len(found), "named": named}


def lateness(run: Run, faults: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Time from due to first handling, in ms: handlings affected by a fault, and the others."""
    rows = run.handled.rows
    rows = rows[rows["attempt"] == 1]
    due, begin = rows["due"] * 1000, rows["begin"]
    late = (begin - due) / 1000
    windows = [Window(one["since"], one["until"] + SETTLES_US, one["kind"]) for one in faults]
    inside = meet(windows, due, begin)
    return {"outside faults": _spread(late[~inside]), "inside faults": _spread(late[inside])}


def _spread(values: NDArray[Any]) -> dict[str, float]:
    found = {"messages": float(len(values))}
    if len(values):
        for one, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
            found["max" if one == 100 else f"p{one:g}"] = round(float(value), 3)
    return found


def redelivery(run: Run) -> dict[str, dict[str, float]]:
    """From a handler's kill -9 to the next handling of its messages, in ack timeouts.

    `alone`: there was no other fault meanwhile.
    """
    causes = Causes.of(run.events, run.stalls)
    done = [one for one in run.events if one["event"] == "fault" and "skipped" not in one]
    faults = [Window(one["since"], one["until"] + SETTLES_US, one["kind"]) for one in done]
    rows = run.handled.rows
    alone, every = [], []
    for row in np.nonzero((rows["end"][:-1] == 0) & (rows["verdict"][:-1] == Verdict.BEGUN))[0]:
        this, after = rows[row], rows[row + 1]
        killed = causes.kills.get(int(this["process"]))
        if killed is None or any(this[name] != after[name] for name in ("message", "place")):
            continue
        took = int(after["begin"]) - killed
        if took < 0:
            continue  # it had lost the message before it was killed
        every.append(took / ACK_US)
        if sum(one.meets(killed, int(after["begin"])) for one in faults) == 1:
            alone.append(took / ACK_US)
    return {"alone": _spread(np.array(alone)), "with other faults": _spread(np.array(every))}


def write(found: dict[str, Any], out: Path) -> str:
    """Write `report.json` and `report.txt`; returns the text."""
    (out / "report.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    text = "\n".join(_text(found)) + "\n"
    (out / "report.txt").write_text(text, encoding="utf-8")
    return text


def _text(found: dict[str, Any]) -> list[str]:
    options = found["options"]
    lines = [
        (
            f"torture run: {found['seconds']:.0f} s, persistence {options['persistence']}, "
            f"seed {options['seed']}, {options['managers']} managers, {options['program']}"
        ),
        "",
        "messages",
        *_table(found["counts"]),
        *_table({f"error {name}": n for name, n in found["errors"].items()}),
        "",
        f"faults: {sum(found['faults'].values())}, replies lost: {found['lost_replies']}",
        *_table(found["faults"]),
        *_table({f"{name}, half done": n for name, n in found["half_done"].items()}),
        *_table({f"{name}, not done": n for name, n in found["skipped"].items()}),
        "",
        "handled again, and why",
        *_table(found["handled_again"]),
    ]
    for title, unit in (("lateness_ms", "ms"), ("redelivery", "ack timeouts")):
        lines += ["", f"{title.partition('_')[0]}, {unit}"]
        for name, spread in found[title].items():
            said = "  ".join(f"{key} {value:,.6g}" for key, value in spread.items())
            lines.append(f"  {name}: {said}")
    lines += ["", "second half: least, mean, most; growth from beginning to end"]
    for name, one in found["second_half"].items():
        lines.append(
            f"  {name:24} {one['least']:12,.1f} {one['mean']:12,.1f} {one['most']:12,.1f}"
            f" {one['growth']:+8.1%}"
        )
    lines += ["", *_named(found["excused"], "explained by a fault"), *_named(found["verdicts"], "")]
    return [*lines, "", "CLEAN" if found["clean"] else "NOT CLEAN"]


def _table(rows: dict[str, Any]) -> list[str]:
    return [f"  {name:44} {n:12,}" for name, n in rows.items()]


def _named(lists: dict[str, Any], why: str) -> list[str]:
    lines = []
    for name, found in lists.items():
        lines.append(f"{name}{', ' if why else ''}{why}: {found['count']:,}")
        lines += [f"  {one['message']}  {one['what']}" for one in found["named"][:SHOWN]]
        if found["count"] > SHOWN:
            lines.append("  ... the others are in report.json")
    return lines
