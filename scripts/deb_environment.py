"""Makes the environment of Python that the Debian package has below /usr/lib/iserblk.

    /usr/bin/python3 scripts/deb_environment.py --output DIR

debian/rules runs this, at the top of the tree. iserblk is compiled, and installed into
DIR/environment, which sees the distribution's packages of Python. What the distribution has in a
version that pyproject.toml allows is taken from there; what it lacks, or has in an older version,
comes from the package index: in the version, and with one of the hashes, that debian/pins/run.txt
has for it. So do the tools that compile, from debian/pins/build.txt. pip chooses nothing, and
refuses a file with another hash. scripts/pins writes the pins. Then, below DIR:

    tree/usr/lib/iserblk    the environment as it is installed, with what came from the index alone
    bundled.txt             these packages, with their versions and licences
    sbom.cdx.json           the same as a bill of materials (CycloneDX), with the hashes of the
                            files that were taken from the index
    substvars               iserblk:Depends=, the distribution's packages that are used

Needs only the standard library, and in the environment pip and Debian's python3-packaging.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import sbom

TOP = Path(__file__).resolve().parent.parent
HOME = Path("usr/lib/iserblk")
DISTRIBUTIONS = Path("/usr/lib/python3/dist-packages")
EXTRA = "fuse"
PINS = TOP / "debian" / "pins"
# Of iserblk beside the data path. Without them it works, too, more slowly or without RDMA devices.
COMPILED = (
    *("_crc", "_files", "_octets", "disk.durability._copies", "rcap.iwarp._frames"),
    *("rcap.verbs._gaps", "sockets._syscalls"),
)
# Of a package's metadata, what says where and how it was built.
_UNWANTED = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"}
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*\(?([<>=!~][^;)]*|)\)?\s*(?:;\s*(.*))?"
)
_PIP = ("-m", "pip", "--no-cache-dir", "--disable-pip-version-check")
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


def lacking(name: str) -> list[tuple[str, str]]:
    """What ``name`` needs, directly or not, that is not here in a version that is allowed: names,
    each with the versions that are. What the system's packages need is its package manager's
    matter."""
    from packaging.requirements import Requirement  # noqa: PLC0415 (as above)

    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop(0)
        seen.add(each)
        for text in importlib.metadata.distribution(each).requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            ours = each == name
            if marker and not marker.evaluate({"extra": EXTRA if ours else ""}):
                continue
            needed = canonical(requirement.name)
            try:
                distribution = importlib.metadata.distribution(needed)
            except importlib.metadata.PackageNotFoundError:
                found[needed] = str(requirement.specifier)
                continue
            if not requirement.specifier.contains(distribution.version, prereleases=True):
                found[needed] = str(requirement.specifier)
            elif place_of(distribution) != DISTRIBUTIONS and needed not in seen:
                waiting.append(needed)
    return sorted(found.items())


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


def bill(
    bundled: list[Distribution], archives: Path, tools: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The bill of materials of iserblk, the first, and what is bundled with it. ``archives``: the
    directory with the files that these were taken from. ``tools``: versions of mypy and Cython, of
    which compiled modules have parts in them. Raises SystemExit: one has no file there."""
    ours, *others = bundled
    files = {}
    for path in archives.iterdir():
        name, version = re.sub(r"\.(tar\.gz|zip)$", "", path.name).rpartition("-")[::2]
        if path.suffix == ".whl":
            name, version = path.name.split("-")[:2]
        files[canonical(name), version] = hashlib.sha256(path.read_bytes()).hexdigest()
    main = sbom.ourselves(ours.version)
    parts = {}
    for each in others:
        key = canonical(each.metadata["Name"])
        if (key, each.version) not in files:
            raise SystemExit(f"deb_environment: {key} {each.version} was not taken from {archives}")
        parts[key] = sbom.of_python(each.metadata, files[key, each.version])
    refs = {key: part["bom-ref"] for key, part in parts.items()}
    needs = {}
    for each in bundled:
        wanted = (parse(text) for text in each.requires or [])
        needs[refs.get(canonical(each.metadata["Name"]), main["bom-ref"])] = [
            refs[name] for name, _, marker in wanted if name in refs and _holds(marker)
        ]
    inside = sbom.compiled_in(tools or {})
    needs[main["bom-ref"]] += [part["bom-ref"] for part in inside]
    return sbom.document(main, [*parts.values(), *inside], needs)


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
    tools = {name: version_of(PINS / "build.txt", canonical(name)) for name in ("mypy", "Cython")}
    made = bill(bundled, output / "archives", tools)
    if faults := sbom.differences(made, inner):
        raise SystemExit(f"deb_environment: the bill of materials is wrong: {'; '.join(faults)}")
    (output / "sbom.cdx.json").write_text(sbom.text(made))
    depends = ", ".join(dependencies(system))
    (output / "substvars").write_text(f"iserblk:Depends={depends}\n")
    say(f"bundled: {', '.join(sorted(lines, key=str.lower))}")
    say(f"of the distribution: {depends}")


# --- outside --------------------------------------------------------------------------------------


def pins(path: Path) -> dict[str, str]:
    """The pins in a file that scripts/pins has written: name → its lines. Raises SystemExit: one
    has no hash, or is not pinned to a version."""
    found: dict[str, str] = {}
    name = ""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith(("#", "    #")) or not line.strip():
            continue
        if not line.startswith(" "):
            name, equals, _ = line.partition("==")
            if not equals:
                raise SystemExit(f"deb_environment: {path.name}: no version: {line}")
            found[name] = ""
        found[name] += f"{line}\n"
    for name, lines in found.items():
        if "--hash=sha256:" not in lines:
            raise SystemExit(f"deb_environment: {path.name}: {name} has no hash")
        found[name] = lines.rstrip("\\\n") + "\n"
    return found


def version_of(path: Path, name: str) -> str:
    """The version to which ``name`` is pinned in a file."""
    return pins(path)[name].split()[0].partition("==")[2]


class Index:
    """What comes from the package index: by the pins alone. ``tools``: a Python whose environment
    has what compiles; ``run`` runs a command."""

    def __init__(self, tools: Path, output: Path, run: Callable[..., None]) -> None:
        self._pip = (tools, *_PIP)
        self._run = run
        self.archives, self.wheels = output / "archives", output / "wheels"
        self._wanted = output / "wanted.txt"
        self.archives.mkdir(parents=True)  # also where nothing has to be fetched

    def fetch(self, lines: Iterable[str]) -> None:
        """Put files with these pins into ``archives``, and a wheel of each into ``wheels``. Raises
        CalledProcessError: there is none, or its hash is another."""
        self._wanted.write_text("".join(lines))
        new = self.archives.with_name("new")
        shutil.rmtree(new, ignore_errors=True)
        self._run(*self._pip, "download", "--no-deps", "--require-hashes", "--no-build-isolation",
                  "--dest", new, "--requirement", self._wanted)  # fmt: skip
        for archive in sorted(new.iterdir()):
            self._run(*self._pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation",
                      "--wheel-dir", self.wheels, archive)  # fmt: skip
            archive.rename(self.archives / archive.name)
        new.rmdir()


def make(output: Path) -> None:
    """Make the environment, compile and install into it, and have it write the rest."""
    environment, tools = output / "environment", output / "tools"
    for path in (environment, tools, *(output / name for name in ("wheels", "archives"))):
        shutil.rmtree(path, ignore_errors=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ISERBLK_")}
    clean.pop("PYTHONPATH", None)
    clean["PYTHONNOUSERSITE"] = "1"

    def run(*words: str | Path) -> None:
        subprocess.run(words, env=clean, check=True)

    compiler, python = tools / "bin" / "python3", environment / "bin" / "python3"
    run("/usr/bin/python3", "-m", "venv", tools)
    run(compiler, *_PIP, "install", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--requirement", PINS / "build.txt")  # fmt: skip
    index = Index(compiler, output, run)
    say("compiling")
    run(compiler, *_PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir",
        index.wheels, TOP)  # fmt: skip
    run("/usr/bin/python3", "-m", "venv", "--system-site-packages", environment)
    pinned, fetched = pins(PINS / "run.txt"), set[str]()
    while True:
        run(python, *_PIP, "install", "--no-deps", "--no-index", "--no-compile",
            *sorted(index.wheels.iterdir()))  # fmt: skip
        said = subprocess.run(
            [python, Path(__file__), "--output", output, "--lacking"],
            env=clean, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        wanted = dict(json.loads(said.stdout))
        if not wanted:
            break
        for name, allowed in wanted.items():
            if name in fetched or name not in pinned:
                raise SystemExit(
                    f"deb_environment: debian/pins/run.txt has no {name}{allowed}: run scripts/pins"
                )
        index.fetch(pinned[name] for name in wanted)
        fetched |= set(wanted)
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
    parser.add_argument("--lacking", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    output: Path = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if given.lacking:
        print(json.dumps(lacking("iserblk")))
        return
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
