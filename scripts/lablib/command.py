"""How the commands of scripts/lab, scripts/boot and scripts/kubelet run, and their exit status."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import click

from lablib.archive import Absent
from lablib.vm import Died

_BAD_ARGUMENT = 7


def run_command(command: click.Command, name: str, say: Callable[[str], None], stopped: str) -> int:
    """Run the command, called ``name``. Returns the exit status: the command's own, 1 for Absent
    and Died, 7 bad argument, 130 stopped; then it says ``stopped``."""
    os.environ.pop("PYTHONPATH", None)  # the script has set it for its modules only
    # After these signals, as after Ctrl-C, all that was started is ended first.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    try:
        return int(command.main(prog_name=name, standalone_mode=False) or 0)
    except click.ClickException as error:
        say(error.format_message())
        return _BAD_ARGUMENT
    except (Absent, Died) as error:
        say(str(error))
        return 1
    except (KeyboardInterrupt, click.Abort):
        say(stopped)
        return 128 + signal.SIGINT
