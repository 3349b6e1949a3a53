"""Runs Lisa under faults, and judges it by ledgers outside Redis: `python -m tests.torture --help`.

Exit code 0 only if the verdict is clean.
"""

import argparse
import math
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.servers import ROOT
from tests.torture.checker import Verdicts, check
from tests.torture.faults import choose
from tests.torture.reading import load
from tests.torture.report import figures, write
from tests.torture.run import run

LONGEST_S, LONGEST_ARCHIVED_S = 8.0, 60.0
SHORT_S, SHORT_WAIT_MS = 30.0, 15_000
PERSISTENCE = ("always", "everysec", "snapshot")
RELEASE = "569b0c0"
"""The commit of the last release, 0.1.0."""


class Options(NamedTuple):
    """The options of one run. The same seed and options give the same faults."""

    minutes: float
    seed: int
    persistence: str
    kinds: Sequence[str]
    every_s: float
    rate: float
    managers: int
    consumers: int
    producers: int
    gateway: bool
    restore: bool
    earlier: str | None
    program: str
    out: Path
    check: bool

    @property
    def seconds(self) -> float:
        """For how long messages are sent."""
        return self.minutes * 60

    @property
    def longest_s(self) -> float:
        """The longest delay: a message to be restored must not have been due before."""
        return LONGEST_ARCHIVED_S if self.restore else LONGEST_S

    @property
    def waits_ms(self) -> float:
        """How long a message may wait for its window: a short run ends sooner than it opens."""
        return SHORT_WAIT_MS if self.seconds < SHORT_S else math.inf

    @property
    def roles(self) -> dict[str, list[str]]:
        """The names of all roles, by kind."""
        numbers = {
            "manager": self.managers,
            "consumer": self.consumers,
            "gateway": self.gateway,
            "puller": self.gateway,
            "producer": self.producers,
            "archive": self.restore,
        }
        names = {kind: [f"{kind}-{n + 1}" for n in range(most)] for kind, most in numbers.items()}
        names["producer"] += ["producer-http"] * self.gateway
        return names


def is_known(commit: str) -> bool:
    """Whether the repository, which may be a shallow clone or none, has a commit."""
    git = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    has_git = shutil.which("git") is not None
    return has_git and not subprocess.run(git, check=False, capture_output=True).returncode


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; exits with code 2 if it is invalid."""
    parser = argparse.ArgumentParser("python -m tests.torture", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=3.0, help="how long messages are sent (3)")
    add("--seed", type=int, default=secrets.randbelow(1_000_000), help="repeats a run's faults")
    add("--persistence", choices=PERSISTENCE, default="always")
    add("--faults", default="all", metavar="all|none|LIST", help="kinds, such as 'kill-*,cut'")
    add("--every", type=float, metavar="SECONDS", help="between faults, on average")
    add("--rate", type=float, default=500.0, help="messages sent in a second (500)")
    add("--managers", type=int, choices=(2, 3, 4), help="by default the seed says how many")
    add("--consumers", type=int, default=4, help="at least 2 (4)")
    add("--producers", type=int, default=2, help="at least 2 (2)")
    add("--gateway", action="store_true", help="also send and pull over HTTP")
    add("--restore", action="store_true", help="archive the topic bulk; restore it at the end")
    add("--earlier", metavar="BUILD", help="begin with a directory, a wheel or a commit")
    add("--program", choices=("valkey", "redis"), default="valkey")
    add("--out", type=Path, help="where ledgers and report go, by default into build/torture")
    add("--check", type=Path, metavar="DIR", help="only judge, anew, what a run left there")
    given = parser.parse_args(arguments)
    if given.check is not None and not (given.check / "final.json").exists():
        parser.error(f"{given.check} holds no run that came to its end")
    if given.consumers < 2 or given.producers < 2:
        parser.error("two consumers and two producers are the least: they are of two kinds")
    out = given.check or given.out
    out = out or Path("build", "torture", f"{given.persistence}-{given.seed}")
    if out.exists() and any(out.iterdir()) and not (out / "stage.jsonl").exists():
        parser.error(f"{out} holds something else than an earlier run, which this one would delete")
    earlier = given.earlier
    if earlier is not None and not Path(earlier).exists() and not is_known(earlier):
        parser.error(f"{earlier} is neither a file, nor a directory, nor a commit")
    try:
        kinds = choose(given.faults, earlier=earlier is not None, gateway=given.gateway)
    except ValueError as error:
        parser.error(str(error))
    # Short runs have every kind once, long ones have quiet periods between the faults.
    every_s = min(20.0, max(1.3, (given.minutes * 60 - 12) / (2 * max(len(kinds), 1))))
    managers = given.managers or random.Random(given.seed).randint(2, 4)
    fields = {name: value for name, value in vars(given).items() if name in Options._fields}
    fields |= {"kinds": kinds, "every_s": given.every or every_s, "managers": managers}
    return Options(**fields | {"out": out, "check": given.check is not None})


def torture(options: Options, tell: Callable[[str], None]) -> Verdicts:
    """Run, unless only the files of an earlier run are to be judged; judge, and report."""
    if not options.check:
        shutil.rmtree(options.out, ignore_errors=True)
        run(options, tell)
    found = load(options.out)
    verdicts = check(found)
    tell(write(figures(found, verdicts), options.out))
    return verdicts


def main() -> int:
    tell = partial(print, flush=True)
    options = parse()
    if not options.check:
        again = f"the same faults again with --seed {options.seed} and the same options"
        tell(f"seed {options.seed}: {again}; ledgers in {options.out}")
    return 0 if torture(options, tell).is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
