"""Runs Lisa under faults, and judges it by ledgers outside Redis: `python -m tests.torture --help`.

Exit code 0 only if the verdict is clean.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from tests.torture.checker import check
from tests.torture.options import parse
from tests.torture.reading import load
from tests.torture.report import figures, write
from tests.torture.run import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torture.checker import Verdicts
    from tests.torture.options import Options


def torture(options: Options, tell: Callable[[str], None]) -> Verdicts:
    """Run, judge and report."""
    shutil.rmtree(options.out, ignore_errors=True)
    run(options, tell)
    return judge(options, tell)


def judge(options: Options, tell: Callable[[str], None]) -> Verdicts:
    """Judge the files in a run's directory, and report."""
    found = load(options.out)
    verdicts = check(found)
    tell(write(figures(found, verdicts), options.out))
    return verdicts


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """The command."""
    options = parse()
    if options.check:
        return 0 if judge(options, _tell).is_clean else 1
    _tell(
        f"seed {options.seed}: the same faults again with --seed {options.seed} and the same "
        f"options; ledgers in {options.out}"
    )
    return 0 if torture(options, _tell).is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
