"""The command line of scripts/kubelet."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import click
from lablib.archive import Absent
from lablib.command import run_command
from lablib.host import need_host
from lablib.setups import TOP

from kubeletlib.build import a_kubelet, a_runtime, say
from kubeletlib.settings import kept

_LIMIT_S = 3000  # of the guest: emulated, the kubelet takes minutes where hardware takes seconds
_TEST_LIMIT_S = 1500
_MEMORY = "3G"


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Exit status: pytest's own; 1, with a message, if there is no kubelet or no virtual "
    "machine; 7 bad argument.",
)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, metavar="N",
              help="Programs of the compiler to run at once (all processors).")  # fmt: skip
@click.option("--only-build", is_flag=True, help="Build, and run nothing.")
@click.option("--here", is_flag=True,
              help="Run on this machine, as root, with loop devices. Only where no other user can "
              "log in: the kubelet obeys all of them. It changes settings of the kernel, which are "
              "set back at the end, or at the next start where it was killed.")  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def kubelet(jobs: int, only_build: bool, here: bool, arguments: tuple[str, ...]) -> int:
    """Build a kubelet of the distribution's source, and run tests/kubelet with it in a guest.

    ARGUMENTS go to pytest.
    """
    if here and os.geteuid() != 0:
        raise Absent("--here mounts file systems: run it as root")
    if not here:
        need_host()
    program = a_kubelet(jobs)
    runtime = a_runtime()
    if only_build:
        click.echo(program)
        return 0
    words = [
        "-P",
        "-m",
        "lablib",
        "--memory",
        _MEMORY,
        "--net",
        "--timeout",
        str(_LIMIT_S),
        "python",
    ]
    tests = ["-m", "pytest", "-p", "no:cacheprovider", "-n", "0"]
    tests += ["--timeout", str(_TEST_LIMIT_S), *(arguments or ["-v"]), "tests/kubelet"]
    with kept() if here else nullcontext():
        done = subprocess.run(
            [sys.executable, *([] if here else words), *tests],
            cwd=TOP,
            env={
                **os.environ,
                "KUBELET": str(program),
                "KUBELET_RUNTIME": str(runtime),
                "PYTHONPATH": str(TOP / "scripts"),
            },
            check=False,
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(
        run_command(kubelet, "scripts/kubelet", say, "stopped; what it had changed is set back")
    )
