"""The rate of a lane, as scripts compute it, against exact fractions."""

import random
import re
from fractions import Fraction
from typing import Any

import pytest

from lisa.core.transitions import loader

lua51 = pytest.importorskip("lupa.lua51")

FUNCTIONS = ("settle_tat", "opens_at", "charge")
LOOP = """
return function(many, per, burst, steps)
  local rate, lane, answers = {many = many, per = per, burst = burst}, {tat = 0, rem = 0}, {}
  for i = 1, #steps, 2 do
    local now, cost = steps[i], steps[i + 1]
    local at = opens_at(lane, rate, cost, now)
    if at <= now then charge(lane, rate, cost, now) end
    answers[#answers + 1] = string.format('%.0f', at)
  end
  return table.concat(answers, ' ')
end
"""


def compiled() -> tuple[Any, Any]:
    """The functions of the gate in Lua, run for a list of instants and costs."""
    prelude = loader.prelude()
    found = [re.search(rf"(?ms)^local function {name}\(.*?^end$", prelude) for name in FUNCTIONS]
    source = "\n".join(match.group() for match in found if match)
    runtime = lua51.LuaRuntime()
    return runtime.execute(source + LOOP), runtime.table_from


class Oracle:
    """GCRA with exact fractions of microseconds; a cost above the burst counts as the burst."""

    def __init__(self, many: int, per: int, burst: int) -> None:
        self.each = Fraction(per, many)
        self.burst = burst
        self.tat = Fraction(0)

    def opens_at(self, cost: int, now: int) -> int:
        """The first whole microsecond at which the cost is let through."""
        self.tat = min(max(self.tat, Fraction(now)), Fraction(now + self.limit()))
        at = self.tat + (min(cost, self.burst) - self.burst) * self.each
        return -(-at.numerator // at.denominator)

    def charge(self, cost: int) -> None:
        self.tat += min(cost, self.burst) * self.each

    def limit(self) -> int:
        """The furthest that a theoretical arrival time can be ahead of an unbroken clock."""
        whole = self.burst * self.each
        return -(-whole.numerator // whole.denominator)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))]
)
def test_every_decision_is_that_of_exact_fractions(seed: int) -> None:
    """Together a million decisions, with clocks that stand still, leap and are set back."""
    run, table = compiled()
    chosen = random.Random(seed)
    for _ in range(250):
        many, burst = chosen.choice([1, 2, 3, 7, 10, 999, 1_000_000]), chosen.choice([1, 2, 3, 40])
        per = chosen.choice([1_000, 333_000, 1_000_000, 60_000_000, 86_400_000_000])
        now, steps = 1_800_000_000_000_000 + chosen.randrange(10**9), list[int]()
        usual = max(1, per // many)
        for _ in range(200):
            leap = chosen.choice(
                [0, 1, usual // 3, usual, 2 * usual, burst * usual, -per, 10 * per]
            )
            now += leap if chosen.random() < 0.9 else chosen.randrange(per)
            steps += [now, chosen.choice([1, 1, 1, 2, burst, burst + 5])]
        answers = map(int, run(many, per, burst, table(steps)).split())
        oracle = Oracle(many, per, burst)
        for number, answer in enumerate(answers):
            now, cost = steps[2 * number : 2 * number + 2]
            assert answer == oracle.opens_at(cost, now), (many, per, burst, number, steps)
            if answer <= now:
                oracle.charge(cost)
