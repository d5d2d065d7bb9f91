"""Running a click command as scripts/bench does: exit statuses, signals, the environment."""

from __future__ import annotations

import os
import signal

import click

_BAD_ARGUMENT = 7


def run_command(command: click.Command, name: str) -> int:
    """Returns the exit status: the command's own, 1 an error, 7 bad argument, 130 stopped."""
    # Of scripts/bench for its modules; what is measured starts as its user would start it.
    os.environ.pop("PYTHONPATH", None)
    # Ended by a signal, all servers are ended first, as on Ctrl-C.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    try:
        status = command.main(prog_name=name, standalone_mode=False)
    except click.UsageError as error:
        click.echo(f"bench: {error.format_message()}", err=True)
        return _BAD_ARGUMENT
    except click.ClickException as error:
        click.echo(f"bench: {error.format_message()}", err=True)
        return 1
    except (KeyboardInterrupt, click.Abort):
        click.echo("bench: stopped; everything that it started has ended", err=True)
        return 128 + signal.SIGINT
    return int(status or 0)
