"""``iserblk COMMAND …``: runs the command; on an error prints one line and sets the exit status.

Exit status: 0 done · 1 other · 4 transport · 5 login refused · 7 bad argument or URL ·
8 connect timeout · 11 command timeout · 13 permission · 21 no such target or LUN ·
23 host not found · 24 authentication · 27 not supported · 28 busy · 129, 130, 143 SIGHUP, SIGINT,
SIGTERM.
``mount`` and ``umount`` have those of mount(8): 1 usage, 2 system, 32 failed.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from iserblk import __version__
from iserblk.cli.command import Command, names_of
from iserblk.cli.output import system_words
from iserblk.credentials import hide_command_line
from iserblk.endings import Endings, ending_signals, ignore_further
from iserblk.errors import BadArgument, IserblkError
from iserblk.installation import HERE
from iserblk.names import suggestion
from iserblk.printable import log_to_stderr, printable
from iserblk.url import OF_ALL, may_be_url

# Command → its line in `iserblk --help`. A command's module is imported when the command is run.
COMMANDS = {
    "serve": "Serve files as LUNs, and print their URLs.",
    "target": "Serve files as LUNs, with a name and options of your own.",
    "discover": "Show the targets that a portal knows, and their portals.",
    "info": "Show identity, size, limits and connection of LUNs.",
    "nbd": "Export LUNs over NBD.",
    "attach": "Attach LUNs as block devices, /dev/nbdX.",
    "detach": "Flush and detach block devices.",
    "mount": "Mount LUNs as files, through FUSE.",
    "umount": "Flush and unmount LUNs.",
    "copy": "Copy between LUNs, files and block devices.",
    "compare": "Compare LUNs, files and block devices.",
    "trim": "Tell a LUN that a range is not needed any more.",
    "bench": "Measure the speed of a LUN through the Python API.",
    "status": "Show everything of iserblk that runs here, and its state.",
    "stats": "Show requests and latencies of LUNs in use, and targets here.",
    "top": "Watch the LUNs in use here: speed, latencies, paths, events.",
    "exporter": "Serve the metrics of all LUNs in use, for Prometheus.",
    "csi": "Serve LUNs as volumes of Kubernetes: a CSI node plugin.",
    "doctor": "Check this machine and a portal; say what to do about problems.",
    "add": "Give LUNs a name, which commands take in place of their URLs.",
    "list": "List the named LUNs.",
    "show": "Show one named LUN.",
    "remove": "Remove a named LUN.",
    "enable": "Attach or mount a named LUN now and at each boot, by systemd.",
    "disable": "Detach or unmount a named LUN, and leave it so at the next boot.",
    "import": "Make named LUNs of what open-iscsi knows of targets.",
}

_MODULES = {"import": "importing"}  # a word of Python's is no name of a module

_OF_CSI = {"grpc": "grpcio", "google": "protobuf"}  # first parts of names of modules: packages

_words: Sequence[str] = ()  # of the command line

_USER_INFO = re.compile(rf"\b({OF_ALL}):.*@", re.DOTALL | re.IGNORECASE)


# What other programs call it.
_MEANT = {
    "ls": "list",
    "cp": "copy",
    "convert": "copy",
    "dd": "copy",
    "rm": "remove",
    "delete": "remove",
    "cmp": "compare",
    "diff": "compare",
    "verify": "compare",
    "discard": "trim",
    "login": "attach",
    "logout": "detach",
    "connect": "attach",
    "disconnect": "detach",
    "map": "attach",
    "unmap": "detach",
    "unmount": "umount",
    "benchmark": "bench",
    "ps": "status",
    "monitor": "top",
    "watch": "top",
    "metrics": "stats",
    "scan": "discover",
    "find": "discover",
    "check": "doctor",
    "ping": "doctor",
    "export": "nbd",
    "start": "enable",
    "help": "--help",
    "version": "--version",
}
_LOGS = (
    "a server in the background logs to syslog: `journalctl -t iserblk-mount`, or -t iserblk-nbd,"
    " -t iserblk-target, or -t iserblk-nbd0 for /dev/nbd0"
)
_COMPLETION = (
    "packages bring completion of bash, zsh and fish; `scripts/manpages` installs it from a clone"
    " (docs/using.md)"
)
_STOP = (
    "`iserblk umount MOUNTPOINT` ends a mount, `iserblk detach /dev/nbdX` an attached device,"
    " `iserblk disable NAME` a unit, and `kill PID` or ^C each server; `iserblk status` shows them"
)
# What there is no command for.
_ELSEWHERE = {
    "log": _LOGS,
    "logs": _LOGS,
    "journal": _LOGS,
    "completion": _COMPLETION,
    "completions": _COMPLETION,
    "stop": _STOP,
    "kill": _STOP,
    "flush": "fsync(2), sync(1) and NBD's FLUSH flush; so do `iserblk umount` and `iserblk detach`",
    "config": "options stand in a URL, behind -o, or with a name that `iserblk add` gives",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = _MODULES.get(cmd_name, cmd_name)
        command = importlib.import_module(f"iserblk.cli.{module}").command
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises click.UsageError; what a command takes, and stands before it, is told apart."""
        words = list(args)  # the parser takes from the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            raise click.UsageError(self._misplaced(ctx, name, words), ctx) from None

    def _misplaced(self, ctx: click.Context, name: str, words: Sequence[str]) -> str:
        said = f"No such option '{name}'"
        command = next((word for word in words if word in COMMANDS), "")
        found = self.get_command(ctx, command) if command else None
        if found is not None:
            within = click.Context(found, parent=ctx, info_name=command)
            if name in names_of(found, within):
                return f"{said} here: it stands behind the command: `iserblk {command} {name} …`"
        return said + suggestion(name, names_of(self, ctx))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in COMMANDS or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        said = f"No such command '{name}'"
        if may_be_url(name):
            ctx.fail(f"{said}: a URL stands behind a command, e.g. `iserblk info URL`")
        if name in _MEANT:
            ctx.fail(f"{said}: is it `iserblk {_MEANT[name]}`?")
        if name in _ELSEWHERE:
            ctx.fail(f"{said}: {_ELSEWHERE[name]}")
        ctx.fail(said + suggestion(name, COMMANDS))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them, so that `iserblk --help` is quick."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="iserblk", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Log more on stderr; -vv logs everything.")
@click.option("-q", "--quiet", is_flag=True, help="Only errors on stderr, no progress.")
def cli(verbose: int, quiet: bool) -> None:
    """Use remote SCSI LUNs over iSER or iSCSI, as block devices and as files.

    A LUN's address is iser://HOST[:PORT]/TARGET-IQN[/LUN][?option=value&…], or iscsi://… for
    Traditional iSCSI over TCP. Every command takes a name given by `iserblk add` in its place.
    """
    levels = {0: logging.WARNING, 1: logging.INFO}
    level = logging.ERROR if quiet else levels.get(verbose, logging.DEBUG)
    log_to_stderr(level, "iserblk")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and end the process with the documented status."""
    _open_standard_streams()
    if arguments is None:
        hide_command_line()
    heard = [number for number in ending_signals() if number != signal.SIGINT or _interrupts()]
    Endings(heard, _end).listen()
    try:
        status = _run(arguments)
    finally:
        ignore_further()
    try:
        sys.stdout.flush()
    except OSError as error:
        status = status or _system_said_no(error)
        # So that Python's own flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _open_standard_streams() -> None:
    """Opens each standard stream that is closed, in the wrong direction: no socket gets its number,
    and code that uses the stream gets an error."""
    for stream, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number
    # Python sets these to None for a closed stream.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (for good)
    # A name that the terminal's encoding lacks is shown with escapes, as stderr does.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _interrupts() -> bool:
    """False: SIGINT is ignored, as in a shell's background job, and stays ignored."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _run(arguments: Sequence[str] | None) -> int:
    global _words  # noqa: PLW0603
    _words = sys.argv[1:] if arguments is None else arguments
    try:
        if not _words:  # a question, and no answer to any: the status tells scripts so
            click.echo(
                cli.get_help(click.Context(cli, info_name="iserblk", **cli.context_settings))
            )
            return BadArgument.exit_status
        cli.main(args=arguments, prog_name="iserblk", standalone_mode=False)
    except click.UsageError as error:
        context = error.ctx
        path = context.command_path if context else "iserblk"
        # A word that is out of place may be a URL with a secret.
        said = _USER_INFO.sub(r"\1://…@", error.format_message().rstrip("."))
        end = "" if said.endswith(("?", "!")) else "."
        _complain(f"{said}{end} See `{path} --help`.")
        command = context.command if context else None
        return command.usage_status if isinstance(command, Command) else BadArgument.exit_status
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
        name = error.name or ""
        of_csi = _OF_CSI.get(name.partition(".")[0])
        remedy = HERE.csi() if of_csi else HERE.python_package(name)
        _complain(f"the Python package {of_csi or name} is missing: {remedy}")
        return 1
    return 0


def without_user_info(text: str, words: Sequence[str]) -> str:
    """An error text without what it quotes of ``words``, of a command line, that has an @: out of
    place it may be user info, with a secret on either side. Whole paths are quoted."""
    parts = {
        begin
        for word in words
        for value in (word, word.partition("=")[2])
        for part in (value, *value.split(","))
        for begin in _begins(part)
        if "@" in begin and not begin.startswith("/")
    }
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, "…@…")
    return text


def _begins(part: str) -> list[str]:
    """It, and what is in front of each colon: a file in front of its options."""
    found = [part]
    while ":" in part:
        part = part.rpartition(":")[0]
        found.append(part)
    return found


def _complain(text: str) -> None:
    """Print ``text`` as one line on stderr. If that fails, the exit status stays as it is."""
    line = printable(" ".join(without_user_info(text, _words).split()))
    try:
        print(f"iserblk: {line}", file=sys.stderr, flush=True)
    except OSError:
        # So that Python's own flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _system_said_no(error: OSError) -> int:
    """Print an error of the system in one line; return the exit status. Prints nothing when the
    reader of stdout has closed it (`iserblk info … | head -1`)."""
    if isinstance(error, BrokenPipeError):
        return IserblkError.exit_status
    _complain(system_words(error))
    return IserblkError.exit_status
