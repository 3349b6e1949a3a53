"""Runs a module as `python -m` does, with a clock that may be off: its name, then its arguments."""

from __future__ import annotations

import runpy
import sys

from tests.torture.ledger import shift_clock

if __name__ == "__main__":
    shift_clock()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
