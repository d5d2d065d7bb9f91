"""Runs a click command of a script: exit statuses, signals, the environment."""

from __future__ import annotations

import os
import signal

import click

_BAD_ARGUMENT = 7


def run_command(command: click.Command, name: str) -> int:
    """Run the command that is called ``name``: "scripts/WORD …". Returns the exit status: the
    command's own, 1 for an error, 7 bad argument, 130 stopped."""
    short = name.split(maxsplit=1)[0].removeprefix("scripts/")
    # The script has set it for its modules. Measured programs start as a user starts them.
    os.environ.pop("PYTHONPATH", None)
    # After these signals, as after Ctrl-C, all servers are ended first.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    try:
        status = command.main(prog_name=name, standalone_mode=False)
    except click.UsageError as error:
        click.echo(f"{short}: {error.format_message()}", err=True)
        return _BAD_ARGUMENT
    except click.ClickException as error:
        click.echo(f"{short}: {error.format_message()}", err=True)
        return 1
    except (KeyboardInterrupt, click.Abort):
        click.echo(f"{short}: stopped; everything that it started has ended", err=True)
        return 128 + signal.SIGINT
    return int(status or 0)
