"""Handwritten ledgers, for the tests of their readers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.torture.checker import check
from tests.torture.reading import Run, load
from tests.torture.restoring import ARCHIVED
from tests.torture.world import TOPICS, Do, Verdict, number_of, place_number, topic_number

if TYPE_CHECKING:
    from pathlib import Path

    from tests.torture.verdicts import Verdicts

BEGAN_US = 1_700_000_000_000_000
SENDER = 1
HANDLER = 2


def us(seconds: float) -> int:
    """An instant of the story, in microseconds."""
    return BEGAN_US + round(seconds * 1e6)


class Papers:
    """The files that a run would leave. Instants are in seconds from its beginning."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.sent: list[str] = []
        self.handled: dict[int, list[str]] = {HANDLER: []}
        self.stalls: dict[int, list[str]] = {}
        self.events: list[dict[str, Any]] = []
        self.live: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []
        self.stats: dict[str, Any] = {topic.name: {} for topic in TOPICS}
        self.bodies: int | None = None
        self.ticks: dict[str, Any] | None = None
        self.archived: list[int] = []
        self.logs: dict[str, str] = {}
        self.samples: list[dict[str, Any]] = []
        self._count = self._calls = 0
        self._dues: dict[int, float] = {}
        self.begin(SENDER, "producer-1")
        self.begin(HANDLER, "consumer-1")

    def begin(self, process: int, role: str) -> None:
        self._event("start", 0, role=role, number=process)
        if not role.startswith("producer"):
            self.handled.setdefault(process, [])

    def _event(self, event: str, at_s: float, **fields: Any) -> None:
        self.events.append({"event": event, "at": us(at_s), **fields})

    def fault(self, kind: str, target: str, since_s: float, until_s: float, **more: Any) -> None:
        self._event(
            "fault", until_s, kind=kind, target=target, since=us(since_s), until=us(until_s), **more
        )

    def kill(self, process: int, at_s: float, role: str = "consumer-1") -> None:
        self.fault("kill-consumer", role, at_s, at_s + 1, numbers=[process], killed=us(at_s))

    def loss(self, since_s: float, until_s: float) -> None:
        self._event("loss", until_s, since=us(since_s), until=us(until_s))

    def end(self, role: str, how: str, code: int, age_s: float = 60.0) -> None:
        self._event("end", 1, role=role, number=9, how=how, code=code, age_s=age_s)

    # What a sender writes

    def send(
        self,
        topic: str = "fickle",
        *,
        at_s: float = 0.0,
        due: str = "+1000",
        do: Do = Do.OK,
        ttl_ms: int = 0,
        confirmed: bool = True,
    ) -> int:
        number = number_of(SENDER, self._count)
        self._count += 1
        self._dues[number] = _seconds(due, at_s)
        self._call("S", at_s, topic_number(topic), number, 1, int(do), due, ttl_ms)
        self._answer(at_s, "a" if confirmed else None)
        return number

    def cancel(self, number: int, at_s: float, answer: str | None = "c") -> None:
        self._call("X", at_s, number)
        self._answer(at_s, answer)

    def move(self, number: int, at_s: float, due: str, answer: str | None = "r") -> None:
        if answer == "r":
            self._dues[number] = _seconds(due, at_s)
        self._call("R", at_s, number, due)
        self._answer(at_s, answer)

    def again(self, number: int, at_s: float, due: str, answer: str | None = "d") -> None:
        self._call("D", at_s, number, due)
        self._answer(at_s, answer)

    def replace(self, number: int, at_s: float, due: str, answer: str | None = "r") -> int:
        new = number_of(SENDER, self._count)
        self._count += 1
        self._dues[new] = _seconds(due, at_s)
        self._call("P", at_s, topic_number("fickle"), new, number, due)
        self._answer(at_s, answer)
        return new

    def _call(self, kind: str, at_s: float, *fields: object) -> None:
        self._calls += 1
        self.sent.append("\t".join(map(str, (kind, self._calls, us(at_s), *fields))))

    def _answer(self, at_s: float, letters: str | None) -> None:
        if letters is None:
            self.fail(at_s)
            self.fault("hang", "producer", at_s, at_s + 3)
        else:
            self.sent.append(f"C\t{self._calls}\t{us(at_s + 0.01)}\t{letters}")

    def fail(self, at_s: float, error: str = "ServerUnavailable", settled: int = 0) -> None:
        """The last call ends in an error, four seconds after it began."""
        self.sent.append(f"E\t{self._calls}\t{us(at_s + 4)}\t{settled}\t{error}")

    # What a handler writes

    def handle(
        self,
        number: int,
        at_s: float,
        *,
        took_s: float | None = 0.001,
        topic: str = "fickle",
        group: str = "lisa",
        verdict: Verdict = Verdict.OK,
        attempt: int = 1,
        due_s: float | None = None,
        asked: bool = True,
        unsure_s: float = 0.0,
        process: int = HANDLER,
    ) -> None:
        """It began up to `unsure_s` after `at_s`, and ended up to that before its end."""
        if due_s is None:  # the due time asked for, unless the test sets a wrong one
            due_s = min(at_s, self._dues.get(number, at_s)) if attempt == 1 else at_s
        due_ms = us(due_s) // 1000
        end = 0 if took_s is None else us(at_s + took_s)
        end_from = 0 if took_s is None else us(at_s + took_s - unsure_s)
        self.handled.setdefault(process, []).append(
            "\t".join(
                map(
                    str,
                    (
                        number,
                        place_number(topic, group),
                        attempt,
                        due_ms,
                        us(at_s),
                        end,
                        int(Verdict.BEGUN if took_s is None else verdict),
                        int(asked),
                        0,
                        us(at_s + unsure_s),
                        end_from,
                    ),
                )
            )
        )

    def stay(
        self,
        number: int,
        state: str,
        topic: str = "fickle",
        group: str | None = "lisa",
        reason: str = "",
    ) -> None:
        self.live.append(
            {
                "number": number,
                "topic": topic,
                "group": group,
                "state": state,
                "id": "x",
                "attempts": 1,
                "reason": reason,
            }
        )

    def run(self) -> Run:
        """Write all files, and read them as a checker does."""
        self.write()
        return load(self.out)

    def write(self) -> None:
        ledgers = self.out / "ledgers"
        ledgers.mkdir()
        _write(ledgers / f"sent-{SENDER}.tsv", self.sent)
        for process, lines in self.handled.items():
            _write(ledgers / f"handled-{process}.tsv", lines)
        for process, lines in self.stalls.items():
            _write(ledgers / f"handled-{process}.stalls", lines)
        _write(self.out / "stage.jsonl", [json.dumps(event) for event in self.events])
        bodies = len({row["number"] for row in self.live}) if self.bodies is None else self.bodies
        final = {
            "live": self.live,
            "bodies": bodies,
            "stats": self.stats,
            "findings": self.findings,
            "ticks": self.ticks,
        }
        (self.out / "logs").mkdir()
        for name, text in self.logs.items():
            (self.out / "logs" / name).write_text(text, encoding="utf-8")
        _write(self.out / "samples.jsonl", [json.dumps(one) for one in self.samples])
        (self.out / ARCHIVED).write_text(json.dumps(self.archived), encoding="utf-8")
        (self.out / "final.json").write_text(json.dumps(final), encoding="utf-8")

    def verdicts(self) -> Verdicts:
        return check(self.run())

    def verdicts_again(self) -> Verdicts:
        """Judge the files already written."""
        return check(load(self.out))


def accused(papers: Papers) -> dict[str, int]:
    """The number of accusations by kind."""
    guilty = papers.verdicts().guilty
    return {fault: len(found) for fault, found in guilty.items() if found}


def _seconds(due: str, at_s: float) -> float:
    if due.startswith("+"):
        return at_s + int(due) / 1000
    return (int(due) * 1000 - BEGAN_US) / 1e6


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
