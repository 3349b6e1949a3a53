"""`lisa demo` leaves no process or directory behind, however it ends."""

import os
import signal
from pathlib import Path

import pytest

from tests.servers import Process, Processes, runs, wait_until

DEMO = ("-m", "lisa.cli.main", "demo", "--messages", "2000", "--seconds", "5")


def descendants(pid: int) -> set[int]:
    """All descendants of a process, according to Linux."""
    found: set[int] = set()
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found |= {child} | descendants(child)
    return found


def demo_in_full_swing(processes: Processes, tmp_path: Path) -> tuple[Process, set[int], Path]:
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc to see which processes a program started")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    demo = processes.start(*DEMO, env={"TMPDIR": str(scratch), "COLUMNS": "100"})
    wait_until(lambda: any(scratch.rglob("consumer.ledger")))
    # A server, three roles, and a supervising process for each of them.
    wait_until(lambda: len(descendants(demo.pid)) >= 8)
    return demo, descendants(demo.pid), scratch


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(None, marks=pytest.mark.full),
    ],
)
def test_a_demo_that_has_ended_leaves_nothing(
    processes: Processes, tmp_path: Path, number: signal.Signals | None
) -> None:
    demo, started, scratch = demo_in_full_swing(processes, tmp_path)
    if number is None:
        assert demo.wait() == 0, demo.output
        assert "lost" in demo.output
    else:
        os.kill(demo.pid, number)  # the demo alone, not its children
        assert demo.wait() != 0
    assert "Traceback" not in demo.output
    wait_until(lambda: not [pid for pid in started if runs(pid)])
    wait_until(lambda: not list(scratch.iterdir()))
