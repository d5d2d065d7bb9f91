"""The command line of scripts/lab."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import click

from lablib.acceleration import usable
from lablib.archive import Absent, say
from lablib.command import run_command
from lablib.host import path
from lablib.kernel import Kernel, the_kernel, user_mode_kernel
from lablib.setups import SETUPS, provide
from lablib.vm import Machine, NotBooted
from lablib.wish import Wish

_LIO_PORT = 3260
_BOOTS = 3


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Exit status: the command's own; 1, with a message, if the guest died, was too slow or "
    "is not available; 7 bad argument.",
)
@click.option("--setup", "name", default="none", metavar="NAME", help="The set-up (default none).")
@click.option("--timeout", "limit_s", type=click.FloatRange(1), default=600, metavar="S",
              help="Seconds until the guest is ended, counted from its start (600).")  # fmt: skip
@click.option("--mtu", type=click.IntRange(576, 65536), default=65536, metavar="BYTES",
              help="MTU of every link in the guest, e.g. 1500 (default 65536).")  # fmt: skip
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Directory that the guest may write; also gets the console's log.")  # fmt: skip
@click.option("--net", is_flag=True, help="Add an emulated network card, 10.0.2.15.")
@click.option("--forward", "forwards", multiple=True, metavar="HOSTPORT:GUESTPORT",
              help="Forward a port of 127.0.0.1 to the guest; implies --net.")  # fmt: skip
@click.option("--in-turn", is_flag=True,
              help="Emulate the guest's processors by one of the host's, in turn.")  # fmt: skip
@click.option("--user-mode", is_flag=True,
              help="Instead of emulating processors, run a kernel in user mode (six times faster, "
              "one processor) where it has all that the set-up needs.")  # fmt: skip
@click.option("--memory", default="2G", metavar="SIZE", help="Memory of the guest (default 2G).")
@click.option("--list", "only_list", is_flag=True, help="Print the set-ups and do nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Say how long booting took.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def lab(
    name: str, limit_s: float, mtu: int, results: Path | None, net: bool,
    forwards: tuple[str, ...], in_turn: bool, user_mode: bool, memory: str, only_list: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> int:  # fmt: skip
    """Run COMMAND in a virtual machine with the distribution's full kernel.

    The guest sees the host's files, copy-on-write. In the command LAB_URL is the URL of the
    set-up's LUN. docs/lab.md describes the set-ups and their variables.
    """
    if only_list:
        width = max(map(len, SETUPS))
        for setup in SETUPS.values():
            click.echo(f"{setup.name:{width}}  {setup.about}")
        return 0
    if name not in SETUPS:
        raise click.UsageError(f"no set-up is called {name}; --list shows them all")
    if not command:
        raise click.UsageError("no COMMAND")
    setup = SETUPS[name]
    if not re.fullmatch(r"[1-9][0-9]*[MG]", memory):
        raise click.UsageError(f"--memory {memory}: not a number with M or G behind it")
    ports = [_parse_forward(text) for text in forwards]
    kernel = the_kernel()
    variables = provide(setup, kernel)
    kvm = usable(kernel)
    if user_mode and setup.user_mode and not (kvm or net or ports):
        kernel = _in_user_mode() or kernel
    if setup.on_host:
        ports.append((_free_port(), _LIO_PORT))
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        results = results.resolve()
    wish = Wish(
        kernel, setup.name, kvm=kvm, in_turn=in_turn, memory=memory, mtu=mtu,
        network=net, forwards=tuple(ports), results=results, variables=variables,
    )  # fmt: skip
    for boot in range(1, _BOOTS + 1):
        try:
            return _run(wish, setup.on_host, command, limit_s, verbose)
        except NotBooted as hung:
            if boot == _BOOTS:
                raise
            say(f"{str(hung).splitlines()[0]}; starting another guest")
    raise AssertionError


def _in_user_mode() -> Kernel | None:
    """The kernel of user mode, if it can be had and works here."""
    if os.geteuid() != 0:
        say("using software emulation: a kernel in user mode needs root")
        return None
    try:
        kernel = user_mode_kernel()
    except Absent as reason:
        say(f"using software emulation: {reason}")
        return None
    return kernel if usable(kernel) else None


def _run(wish: Wish, on_host: bool, command: tuple[str, ...], limit_s: float, verbose: bool) -> int:
    with Machine(wish, () if on_host else command) as machine:
        if verbose or on_host:
            status = machine.wait(limit_s, until=lambda: machine.ready() is not None)
            if verbose:
                say(f"{wish.setup} is ready after {machine.age_s:.1f} s")
            if status is not None:
                return status
        if on_host:
            return _on_host(command, machine, limit_s, wish.forwards[-1][0])
        return machine.wait(limit_s) or 0


def _on_host(command: tuple[str, ...], machine: Machine, limit_s: float, port: int) -> int:
    """Run the command on the host, with the guest's variables. The guest must outlive it."""
    variables = machine.ready() or {}
    for name in ("LAB_URL", "LAB_URL2"):
        variables[name] = variables[name].replace(f"10.0.2.15:{_LIO_PORT}", f"127.0.0.1:{port}")
    variables |= machine.results_variable
    variables |= {
        "PATH": path(),
        "LAB_SETUP": machine.setup,
        "LAB_PORT": str(port),
        "LAB_ADDRESS": "127.0.0.1",
    }
    try:
        program = shutil.which(command[0], path=path()) or command[0]
        process = subprocess.Popen([program, *command[1:]], env={**os.environ, **variables})
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return 127
    try:
        machine.wait(limit_s, until=lambda: process.poll() is not None)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _parse_forward(text: str) -> tuple[int, int]:
    host, _, guest = text.partition(":")
    if not (host.isdigit() and guest.isdigit()):
        raise click.UsageError(f"--forward {text}: not HOSTPORT:GUESTPORT")
    return int(host), int(guest)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(run_command(lab, "scripts/lab", say, "stopped; the guest is gone"))
