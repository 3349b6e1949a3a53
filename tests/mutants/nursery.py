"""Runs tests against patched copies of Lisa: a process for each, two at a time.

`python nursery.py ROOT SCRATCH` reads jobs as JSON and writes one line for each finished job. It
loads pytest and the libraries but not Lisa, then forks: loading them costs more than most tests
take. Only a job's own process sees its patches.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

AT_A_TIME = 2
LONGEST_S = 120
"""A defect may make a test hang; that does not count as caught."""

PLUGINS = ("xdist.plugin", "pytest_asyncio.plugin", "pytest_timeout")
LIBRARIES = (
    "apscheduler.schedulers.background",
    "fakeredis",
    "httpx",
    "hypothesis",
    "lupa",
    "msgspec",
    "prometheus_client",
    "pydantic_settings",
    "redis.asyncio.cluster",
    "starlette.routing",
    "time_machine",
    "yaml",
    *PLUGINS,
)

Job = dict[str, Any]


class Witness:
    """Records the tests' results, and the reasons."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[dict[str, str]] = []
        self.broken = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.failed and call.excinfo is not None:
            self.failures.append(
                {
                    "test": item.nodeid,
                    "stage": call.when,
                    "error": call.excinfo.typename,
                    "said": call.excinfo.exconly()[:600],
                }
            )
        elif report.skipped:
            self.broken = f"{item.nodeid} is skipped"
        elif call.when == "call":
            self.passed += 1
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken = str(report.longrepr)[-600:]


def copy(root: Path, base: Path) -> None:
    """Copy everything that the tests read from the tree."""
    without = shutil.ignore_patterns("__pycache__")
    for name in ("lisa", "lua", "tests", "configs"):
        shutil.copytree(root / name, base / name, ignore=without)
    shutil.copy2(root / "pyproject.toml", base)


def try_out(job: Job, base: Path) -> Job:
    """In the job's process: patch, test, report."""
    place = base
    if job["files"]:
        place = base.parent / job["name"]
        shutil.copytree(base, place, copy_function=os.link)
        for name, text in job["files"].items():
            (place / name).unlink()  # a link: keep the shared file
            (place / name).write_text(text, encoding="utf-8")
    os.chdir(place)
    sys.path.insert(0, str(place))
    os.environ["PYTHONPATH"] = str(place)  # of processes that tests start
    sys.dont_write_bytecode = bool(job["files"])
    witness = Witness()
    arguments = ["-qm", "", "--basetemp", str(place / "tmp"), "-p", "no:cacheprovider"]
    arguments += ["-x"] if job["files"] else []
    plugins = [sys.modules[name] for name in PLUGINS]
    code = pytest.main([*arguments, *job["tests"]], plugins=[witness, *plugins])
    import lisa

    if not str(lisa.__file__).startswith(str(place)):
        witness.broken = f"tested {lisa.__file__}"
    elif code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        witness.broken = witness.broken or f"pytest ended with {code!r}"
    return {"name": job["name"], **vars(witness)}


def child(job: Job, base: Path) -> None:
    """Run a job in a forked child; never returns."""
    signal.alarm(LONGEST_S)
    told = base.parent / f"{job['name']}.json"
    said = os.open(base.parent / f"{job['name']}.txt", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(said, number)
    try:
        told.write_text(json.dumps(try_out(job, base)), encoding="utf-8")
    except BaseException:  # noqa: BLE001  whatever it was, this process goes no further
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def reap(running: dict[int, Job], base: Path) -> None:
    """Wait for one process, and report its result."""
    pid, status = os.wait()
    name = running.pop(pid)["name"]
    outcome = {"name": name, "broken": f"its process ended with {status}"}
    with suppress(FileNotFoundError):
        outcome = json.loads((base.parent / f"{name}.json").read_text(encoding="utf-8"))
    if outcome.get("broken"):
        said = (base.parent / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
        outcome["broken"] += f"\n{said[-2000:]}"
    print(json.dumps(outcome), flush=True)  # noqa: T201  this is the answer
    shutil.rmtree(base.parent / name, ignore_errors=True)


def main(root: Path, scratch: Path) -> None:
    jobs: list[Job] = json.load(sys.stdin)
    base = scratch / "base"
    base.mkdir()
    copy(root, base)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in LIBRARIES:
        __import__(name)
    running: dict[int, Job] = {}
    for job in jobs:
        # The unpatched run goes first and alone: it compiles what the others only link to.
        while len(running) >= AT_A_TIME or any(not one["files"] for one in running.values()):
            reap(running, base)
        pid = os.fork()
        if not pid:
            child(job, base)
        running[pid] = job
    while running:
        reap(running, base)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
