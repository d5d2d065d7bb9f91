"""Makes the environment of Python that the Debian package has below /usr/lib/iserblk.

    /usr/bin/python3 scripts/deb_environment.py --output DIR

debian/rules runs this, at the top of the tree. pip compiles a wheel of the tree and installs it,
with the extra ``fuse``, into DIR/environment, which sees the distribution's packages of Python. So
pip itself decides: what the distribution has in a version that pyproject.toml allows is taken from
there; what it lacks, or has in an older version, comes from the package index, as do the tools that
compile. Then, below DIR:

    tree/usr/lib/iserblk    the environment as it is installed, with what came from the index alone
    bundled.txt             these packages, with their versions and licences
    substvars               iserblk:Depends=, the distribution's packages that are used

Needs only the standard library, and in the environment pip and Debian's python3-packaging.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
HOME = Path("usr/lib/iserblk")
DISTRIBUTIONS = Path("/usr/lib/python3/dist-packages")
EXTRA = "fuse"
# Of iserblk beside the data path. Without them it works, too, more slowly or without RDMA devices.
COMPILED = ("_crc", "disk.durability._copies", "rcap.verbs._gaps", "sockets._syscalls")
# Of a package's metadata, what says where and how it was built.
_UNWANTED = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"}
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*\(?([<>=!~][^;)]*|)\)?\s*(?:;\s*(.*))?"
)
_FLOOR = re.compile(r">=\s*([0-9][0-9.]*)")


def say(text: str) -> None:
    print(f"deb_environment: {text}", file=sys.stderr, flush=True)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(requirement: str) -> tuple[str, str, str]:
    """Name, floor ("" if there is none) and marker of a requirement. Raises ValueError."""
    match = _REQUIREMENT.fullmatch(requirement.strip())
    if match is None:
        raise ValueError(f"{requirement!r} is no requirement")
    floor = _FLOOR.search(match[2])
    return canonical(match[1]), floor[1] if floor else "", (match[3] or "").strip()


# --- in the environment: this file runs there again ----------------------------------------------


def _holds(marker: str) -> bool:
    from packaging.markers import Marker  # noqa: PLC0415 (Debian's; not where this is tested)

    return not marker or bool(Marker(marker).evaluate({"extra": EXTRA}))


def used(name: str) -> Iterator[tuple[Distribution, str]]:
    """The distributions that ``name`` needs, itself first, each with its highest floor. Those that
    the system's need are left out: its package manager knows them."""
    floors: dict[str, str] = {}
    found: dict[str, Distribution] = {}
    waiting = [(name, "")]
    while waiting:
        each, floor = waiting.pop(0)
        floors[each] = max(floors.get(each, ""), floor, key=_numbers)
        if each in found:
            continue
        found[each] = distribution = importlib.metadata.distribution(each)
        if place_of(distribution) == DISTRIBUTIONS:
            continue
        for requirement in distribution.requires or []:
            needed, at_least, marker = parse(requirement)
            # Extras are those of iserblk alone.
            if (each == name or "extra" not in marker) and _holds(marker):
                waiting.append((needed, at_least))
    for each, distribution in found.items():
        yield distribution, floors[each]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.strip(".").split(".") if part]


def place_of(distribution: Distribution) -> Path:
    """The directory that has the packages of a distribution in it."""
    return Path(str(distribution.locate_file("")))


def sort(purelib: Path) -> tuple[list[Distribution], list[tuple[Distribution, str]]]:
    """What is bundled, and what is the system's, with floors. Raises SystemExit for what is
    neither's: it would be missing where the package is installed."""
    bundled, system = [], []
    for distribution, floor in used("iserblk"):
        place = place_of(distribution)
        if place == purelib:
            bundled.append(distribution)
        elif place == DISTRIBUTIONS:
            system.append((distribution, floor))
        else:
            name = distribution.metadata["Name"]
            raise SystemExit(
                f"deb_environment: {name} comes from {place}, which is neither the distribution's"
                " nor the index's: remove it there, or build in a bare root (scripts/deb --release)"
            )
    return bundled, system


def package_of(distribution: Distribution) -> str:
    """The Debian package that a distribution of the system's belongs to."""
    name = canonical(distribution.metadata["Name"])
    metadata = next(
        path
        for path in sorted(DISTRIBUTIONS.glob("*-info"))
        if canonical(path.name.split("-")[0]) == name
    )
    said = subprocess.run(
        ["dpkg-query", "--search", metadata], capture_output=True, text=True, check=True
    )
    return said.stdout.partition(":")[0]


def dependencies(system: list[tuple[Distribution, str]]) -> list[str]:
    """As the field Depends has them."""
    major, minor = sys.version_info[:2]
    words = [f"python3 (>= {major}.{minor})", f"python3 (<< {major}.{minor + 1})"]
    for distribution, floor in system:
        words.append(package_of(distribution) + (f" (>= {floor})" if floor else ""))
    return sorted(words)


def licence_of(distribution: Distribution) -> str:
    metadata = distribution.metadata
    for field in ("License-Expression", "License"):
        for text in metadata.get_all(field) or []:
            if text and "\n" not in text:
                return str(text)
    names = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    return ", ".join(names) or "see its metadata"


def copy(distribution: Distribution, purelib: Path) -> None:
    """The files of a distribution below ``purelib``: no programs, no tests, no bytecode."""
    for file in distribution.files or []:
        path = Path(file)
        if ".." in path.parts or "__pycache__" in path.parts or "_tests" in path.parts:
            continue
        if path.parent.name.endswith(".dist-info") and path.name in _UNWANTED:
            continue
        target = purelib / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(distribution.locate_file(file)), target)
        target.chmod(0o644)


def install(output: Path) -> None:
    """Write what the module's head says."""
    purelib = Path(sysconfig.get_path("purelib"))
    bundled, system = sort(purelib)
    home = output / "tree" / HOME
    shutil.rmtree(home, ignore_errors=True)
    inner = home / purelib.relative_to(sys.prefix)
    for distribution in bundled:
        copy(distribution, inner)
    version = "{}.{}".format(*sys.version_info[:2])
    (home / "bin").mkdir()
    (home / "bin" / "python3").symlink_to(f"../../../bin/python{version}")
    (home / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = true\nversion = {version}\n"
    )
    # A path for nbdkit that does not change with the release.
    (home / "nbd_plugin").symlink_to(inner.relative_to(home) / "nbd_plugin")
    lines = [f"{each.metadata['Name']} {each.version} ({licence_of(each)})" for each in bundled]
    (output / "bundled.txt").write_text(
        "Packages of Python in /usr/lib/iserblk, with their licences; the texts are beside them:\n"
        + "".join(f"{line}\n" for line in sorted(lines[1:], key=str.lower))
    )
    depends = ", ".join(dependencies(system))
    (output / "substvars").write_text(f"iserblk:Depends={depends}\n")
    say(f"bundled: {', '.join(sorted(lines, key=str.lower))}")
    say(f"of the distribution: {depends}")


# --- outside --------------------------------------------------------------------------------------


def make(output: Path) -> None:
    """Make the environment, compile and install into it, and have it write the rest."""
    environment, wheels = output / "environment", output / "wheels"
    for path in (environment, wheels):
        shutil.rmtree(path, ignore_errors=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ISERBLK_")}
    clean.pop("PYTHONPATH", None)
    clean["PYTHONNOUSERSITE"] = "1"

    def run(*words: str | Path) -> None:
        subprocess.run(words, env=clean, check=True)

    python = environment / "bin" / "python3"
    run("/usr/bin/python3", "-m", "venv", "--system-site-packages", environment)
    pip = (python, "-m", "pip", "--no-cache-dir", "--disable-pip-version-check")
    say("compiling")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, TOP)
    (wheel,) = wheels.glob("iserblk-*.whl")
    run(*pip, "install", "--no-compile", f"{wheel}[{EXTRA}]")
    forms = runpy.run_path(str(TOP / "iserblk" / "forms.py"))
    modules = [f"iserblk.{name}" for name in COMPILED if name != "rcap.verbs._gaps"]
    check = f"import {', '.join((*forms['MODULES'], *modules))}; import iserblk.forms as forms\n"
    check += "import importlib.util as util, sys\n"
    check += "found = forms.why_plain or util.find_spec('iserblk.rcap.verbs._gaps') is None\n"
    check += "sys.exit(f'the data path is not compiled: {found}' if found else 0)"
    subprocess.run([python.absolute(), "-P", "-c", check], env=clean, check=True, cwd=output)
    run(python, Path(__file__), "--output", output, "--within")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    output: Path = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if given.within:
        install(output)
        return
    try:
        make(output)
    except subprocess.CalledProcessError as error:
        words = " ".join(map(str, error.cmd[:6]))
        raise SystemExit(
            f"deb_environment: failed with status {error.returncode}: {words}"
        ) from None


if __name__ == "__main__":
    main()
