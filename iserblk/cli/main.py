"""``iserblk COMMAND …``: finds the command, and ends with one line and an exit status on errors.

Exit status: 0 done · 1 other · 4 transport · 5 login refused · 7 bad argument or URL ·
8 connect timeout · 11 command timeout · 13 permission · 21 no such target or LUN ·
23 host not found · 24 authentication · 27 not supported · 28 busy · 130, 143 SIGINT, SIGTERM.
``mount`` and ``umount`` have those of mount(8): 1 usage, 2 system, 32 failed.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from iserblk import __version__
from iserblk.credentials import hide_command_line
from iserblk.errors import BadArgument, IserblkError

# Command → what the list of commands says. A module is imported when its command is run.
COMMANDS = {
    "target": "Serve files as LUNs.",
    "discover": "Show the targets that a portal knows, and the ways to them.",
    "info": "Show identity, size, limits and connection of LUNs.",
    "nbd": "Export LUNs over NBD, through nbdkit.",
    "attach": "Make LUNs block devices, /dev/nbdX.",
    "detach": "End that, after everything is on the disks.",
    "mount": "Mount LUNs as files, through FUSE.",
    "umount": "Unmount, after everything is on the disks.",
    "copy": "Copy between LUNs and files.",
    "trim": "Tell a LUN that a range is not needed.",
    "bench": "Measure a LUN through the Python API.",
    "stats": "Show what LUNs in use are doing.",
    "doctor": "Find out what works here and towards a portal, and what to do.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"iserblk.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without importing them: `iserblk --help` is to be quick."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="iserblk", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; twice: everything.")
@click.option("-q", "--quiet", is_flag=True, help="Only errors on stderr, no progress.")
def cli(verbose: int, quiet: bool) -> None:
    """Remote SCSI LUNs over iSER, as block devices and as files.

    A LUN's address is iser://HOST[:PORT]/TARGET-IQN[/LUN][?option=value&…]
    """
    levels = {0: logging.WARNING, 1: logging.INFO}
    level = logging.ERROR if quiet else levels.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="iserblk: %(message)s", stream=sys.stderr, force=True)


class UsageStatus(click.Command):
    """A command with an exit status of its own for wrong usage."""

    usage_status = 1


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Never returns: ends the process with the documented status."""
    _open_standard_streams()
    if arguments is None:
        hide_command_line()
    signal.signal(signal.SIGTERM, _end)
    status = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        status = status or _system_said_no(error)
        # Python's own flush at exit is not to complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _open_standard_streams() -> None:
    """A stream that was closed on us is opened in the direction that it is not used in: no socket
    gets its number, and its user hears of it."""
    for stream, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number
    # Python has none for a closed one.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (for good)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        cli.main(args=arguments, prog_name="iserblk", standalone_mode=False)
    except click.UsageError as error:
        context = error.ctx
        path = context.command_path if context else "iserblk"
        _complain(f"{error.format_message().rstrip('.')}. See `{path} --help`.")
        command = context.command if context else None
        return command.usage_status if isinstance(command, UsageStatus) else BadArgument.exit_status
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except IserblkError as error:
        _complain(str(error))
        return error.exit_status
    except OSError as error:
        return _system_said_no(error)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("iserblk"):
            raise
        _complain(f"the Python package {error.name} is missing: run scripts/setup")
        return 1
    return 0


def _complain(text: str) -> None:
    """Where nothing can be said, the exit status is all that is left: so it stays."""
    try:
        print(f"iserblk: {' '.join(text.split())}", file=sys.stderr, flush=True)
    except OSError:
        # Python's own flush at exit is not to fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _system_said_no(error: OSError) -> int:
    """Says what, in one line, and returns the exit status. Nothing when the reader of stdout has
    just had enough (`iserblk info … | head -1`)."""
    if isinstance(error, BrokenPipeError):
        return IserblkError.exit_status
    words = error.strerror or str(error)
    if error.filename:
        _complain(f"{error.filename}: {words}")
    elif error.errno in (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _complain(f"cannot write to stdout: {words}")  # the files of a LUN have errors of ours
    else:
        _complain(f"the system refused: {words}")
    return IserblkError.exit_status
