"""Commands that serve, in the foreground or in the background: ``--background``, ``--pidfile``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from iserblk.background import READY, Parent, fork
from iserblk.cli.command import Rare
from iserblk.cli.notify import ready as say_ready
from iserblk.errors import IserblkError
from iserblk.limited_log import limited_lines
from iserblk.pidfile import Pidfile

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True, frozen=True)
class Ground:
    """Where a command serves. ``name``: its own, in syslog. ``directory``: where it is in the
    background; None: where it was started, as relative paths are read there later."""

    name: str
    background: bool = False
    pidfile: str | None = None
    directory: str | None = "/"

    @contextmanager
    def serving(
        self, announce: Callable[[str], None] = say_ready
    ) -> Iterator[Callable[[str], None]]:
        """The life of a server. To be entered before any thread is started, and before anything is
        opened: in the background it is a new process that goes on, while this one ends here, when
        the server is ready, or with its exit status.

        Yields what the server calls with its URL when clients can connect: it writes the PID file,
        has ``announce`` print the URL, and leaves the terminal. It raises IserblkError or OSError
        where that cannot be done. What the log is told is limited (iserblk.limited_log). Errors
        behind that point are in the log as well, since stderr of the background has no reader.
        """
        parent = _go_on() if self.background else None
        with ExitStack() as stack:
            pidfile = None
            if self.pidfile is not None:
                pidfile = stack.enter_context(Pidfile(self.pidfile))
            stack.enter_context(limited_lines())

            def ready(url: str) -> None:
                if pidfile is not None:
                    pidfile.write()
                announce(url)
                if parent is not None:
                    parent.release(self.name, self.directory)
                    stack.enter_context(limited_lines())  # of the handler that is there now

            try:
                yield ready
            except (IserblkError, OSError) as error:
                if parent is not None and parent.released:
                    log.error("%s", error)
                raise
            except Exception:
                if parent is not None and parent.released:
                    log.exception("internal error")
                raise


def background_options(name: str) -> Callable[[F], F]:
    """The options ``--background`` and ``--pidfile`` of a command. ``name``: see Ground."""

    def add(function: F) -> F:
        function = click.option(
            "--pidfile",
            metavar="FILE",
            help="Write the number of the server's process to FILE when clients can connect;"
            " it is removed at the end.",
            cls=Rare,
        )(function)
        return click.option(
            "--background",
            is_flag=True,
            help="Return when clients can connect. The server goes on in the background, and logs"
            f" to syslog: `journalctl -t {name}`.",
        )(function)

    return add


def _go_on() -> Parent:
    """Go on in a new process. This one ends when that serves, with 0; or with its exit status."""
    other = fork()
    if isinstance(other, Parent):
        return other
    if other.said() == READY:
        sys.exit(0)
    code = os.waitstatus_to_exitcode(other.status)  # it has said why
    if code < 0:
        raise IserblkError(f"the server was ended by signal {-code} before it was ready")
    sys.exit(code or IserblkError.exit_status)
