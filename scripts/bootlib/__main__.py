"""The command line of scripts/boot."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from lablib.acceleration import usable
from lablib.archive import Absent
from lablib.command import run_command
from lablib.kernel import the_kernel
from lablib.setups import TOP

from bootlib import say
from bootlib.cases import CASES, Cases, write_report
from bootlib.image import RELEASES, the_disk

_BUILD_S = 3600


@click.command(epilog="Exit status: 0 all passed, 1 not, 7 bad argument.")
@click.option("--release", type=click.Choice(list(RELEASES)), default="bookworm",
              help="Debian's release (default bookworm).")  # fmt: skip
@click.option(
    "--package",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The Debian package; without it scripts/deb builds one.",
)
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), metavar="NAME",
              help="Only this case, and the boots that it needs; repeatable.")  # fmt: skip
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write the cases to FILE, as JSON, one a line.")  # fmt: skip
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Leave the console, the target's log and the LUNs there.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Print the cases, and do nothing.")
def boot(
    release: str, package: Path | None, names: tuple[str, ...], report: Path | None,
    keep: Path | None, only_list: bool,
) -> int:  # fmt: skip
    """Boot Debian with iserblk's package in a virtual machine, and shut it down, with and without
    its target."""
    if only_list:
        for name, about in CASES.items():
            click.echo(f"{name:16}  {about}")
        return 0
    release = RELEASES[release]
    with tempfile.TemporaryDirectory(prefix="iserblk-boot.") as scratch:
        disk = the_disk(release, package or _build(release, Path(scratch)))
        # the_kernel() is what acceleration is tried with.
        kvm = os.access("/dev/kvm", os.R_OK | os.W_OK) and usable(the_kernel())
        directory = Path(scratch)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            directory = keep.resolve()
            for pattern in ("*.lun", "*.copy", "*.flushed", "console", "target.log"):
                for left in directory.glob(pattern):
                    left.unlink()
        cases = Cases(disk, directory, kvm, frozenset(names or CASES))
        try:
            cases.run()
        finally:
            cases.close()
    for each in cases.outcomes:
        how = "passed" if each.passed else f"FAILED: {each.text}"
        say(f"{release}: {each.name}, {each.about}: {how}, {each.took_s:.0f} s")
    if report is not None:
        write_report(cases.outcomes, report)
    return 0 if all(each.passed for each in cases.outcomes) else 1


def _build(release: str, directory: Path) -> Path:
    """The package, made by scripts/deb from HEAD. Raises Absent."""
    say(f"building the package for {release}")
    done = subprocess.run(
        [TOP / "scripts" / "deb", "--release", release, "--output", directory / "deb"],
        stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=_BUILD_S, check=False,
    )  # fmt: skip
    found = sorted((directory / "deb").glob("iserblk_*.deb"))
    if done.returncode or not found:
        raise Absent(f"scripts/deb --release {release} has made no package")
    return found[-1]


if __name__ == "__main__":
    sys.exit(run_command(boot, "scripts/boot", say, "stopped; the guest is gone"))
