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
    """Run, unless only the files of an earlier run are to be judged; judge, and report."""
    if not options.check:
        shutil.rmtree(options.out, ignore_errors=True)
        run(options, tell)
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
    if not options.check:
        _tell(
            f"seed {options.seed}: the same faults again with --seed {options.seed} and the same "
            f"options; ledgers in {options.out}"
        )
    verdicts = torture(options, _tell)
    return 0 if verdicts.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
