"""Which signals stop a role."""

import signal

from lisa.core.daemon.process_signals import exit_on_signals, handler_of, stopping


def test_sighup_stops_a_role_unless_the_program_handles_or_ignores_it() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for _ in range(2):  # what exits at the start is no handler of the program
        assert signal.SIGHUP in stopping()
        exit_on_signals([signal.SIGHUP])
        assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
        assert handler_of(signal.SIGHUP) == signal.SIG_DFL
    for handler in (signal.SIG_IGN, lambda *_: None):
        signal.signal(signal.SIGHUP, handler)
        assert signal.SIGHUP not in stopping()
        assert signal.SIGTERM in stopping()
