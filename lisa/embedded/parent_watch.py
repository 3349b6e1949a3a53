"""Run one program and end it when its parent process ends.

    python -m lisa.embedded.parent_watch SECONDS PROGRAM ARGUMENT...

The parent holds the other end of standard input. Standard input closes when the parent closes it
or dies, even by kill -9. The program then gets SIGTERM and, SECONDS later, SIGKILL. The exit code
is the program's own.
"""

import subprocess
import sys

from lisa.core.daemon.processes import when_parent_ends
from lisa.embedded.supervisor import die_with_parent


def main(seconds: float, argv: list[str]) -> int:
    """Run the program and return its exit code."""
    program = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )

    def end() -> None:
        program.terminate()
        try:
            program.wait(seconds)
        except subprocess.TimeoutExpired:
            program.kill()

    when_parent_ends(sys.stdin.fileno(), end)
    return program.wait()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
