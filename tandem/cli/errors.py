"""What ends a command early: a message for a person, and an exit code for a script."""

FAILURE = 1
USAGE = 2
# As shells report a program that a signal ended: 128 + its number.
INTERRUPTED = 130
BROKEN_PIPE = 141


class CliError(Exception):
    """The command can't go on; the message says why and, where there is a way out, which."""

    def __init__(self, message: str, exit_code: int = FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
