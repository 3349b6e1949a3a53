"""`python -m tests.mutants [NUMBER ...]`: runs the mutants and prints the table."""

import sys

from tests.mutants.mutant import MUTANTS, escape
from tests.mutants.runner import CONTROL, Runner


def main(numbers: list[str]) -> int:
    """Returns how many were not caught."""
    wanted = [one for one in MUTANTS if one.number in numbers] if numbers else MUTANTS
    escaped = 0
    with Runner(wanted) as runner:
        control = runner.outcome(CONTROL)
        if control.get("broken") or control["failures"]:
            print(f"without any defect: {control}")  # noqa: T201  a command prints
            return 1
        for mutant in wanted:
            outcome = runner.outcome(mutant.number)
            complaint = escape(mutant, outcome)
            escaped += complaint is not None
            caught = complaint or outcome["failures"][0]["test"]
            print(f"{mutant.number:5} {mutant.what}\n      {caught}", flush=True)  # noqa: T201
    print(f"{len(wanted)} mutants, {escaped} not caught")  # noqa: T201
    return escaped


sys.exit(min(main(sys.argv[1:]), 1))
