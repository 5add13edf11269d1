"""The exceptions of nagjax: the one a user is meant to read, and the one that ends a run which was asked to stop."""

import contextlib
from collections.abc import Iterator

LONGEST = 300  # characters of a value that are shown


class UserError(Exception):
    """Bad input. The message names the field, its value, and what to change.

    The command line prints it as a single line and exits with code 2.
    """

    def __init__(self, field: str, value: object, fix: str):
        self.field, self.value, self.fix = field, value, fix
        shown = repr(value)
        super().__init__(f"{field} = {shown if len(shown) <= LONGEST else f'{shown[:LONGEST]}...'}: {fix}")

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"UserError: {self}"]


@contextlib.contextmanager
def renamed(field: str, option: str) -> Iterator[None]:
    """Inside this context a UserError of `field` becomes one of `option`."""
    try:
        yield
    except UserError as error:
        if error.field != field:
            raise
        raise UserError(option, error.value, error.fix) from None


class Preempted(SystemExit):
    """A run was asked to end (SIGTERM, SIGHUP) and has saved itself; the process ends with code 0."""
