"""The exceptions meant for people: one line instead of a traceback."""

import signal


class UserError(ValueError):
    """Something the user can mend: the message names what was seen, what was wanted and what to do next.

    Entry scripts print it as one `error:` line and exit with code 2. Broken promises of our own code are
    assertions instead, so that they keep their traceback.
    """


class RunFailed(RuntimeError):
    """A run that cannot go on: numbers that are not finite, a disk that is full. One `error:` line and exit code 1."""


def is_lost_contact(error: Exception) -> bool:
    """A collective that failed because of its peers. gloo has no error class of its own; NCCL's is torch's."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError") or "gloo" in str(error)


class Stopped(Exception):
    """A run that was asked to stop, and has saved what it needs to go on. Exit code 128 + the signal's number."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signal.Signals(number)
