"""Run one program, and end it with whoever asked for it.

    python -m lisa.embedded.leash SECONDS PROGRAM ARGUMENT...

Standard input is the leash: when it closes, because the owner closed it or because the kernel did
after a kill -9, the program is asked to end (SIGTERM) and, after SECONDS, killed. The exit code is
the program's own.
"""

import subprocess
import sys
import threading

from lisa.embedded.supervisor import die_with_parent


def end_with_owner(program: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait for the leash to be let go, then end the program."""
    sys.stdin.read()
    program.terminate()
    try:
        program.wait(seconds)
    except subprocess.TimeoutExpired:
        program.kill()


def main(seconds: float, argv: list[str]) -> int:
    """Run the program to its end."""
    program = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )
    threading.Thread(target=end_with_owner, args=(program, seconds), daemon=True).start()
    return program.wait()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
