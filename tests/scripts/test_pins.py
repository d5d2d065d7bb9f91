"""What Debian's package takes from the package index: pinned, by hash (debian/pins)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import deb_environment
import pytest
from deb_environment import EXTRA, PINS, Index, bill, canonical, lacking, pins
from packaging.requirements import Requirement
from packaging.version import Version

from tests.scripts.test_deb import distribution
from tests.support.target import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUN = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"][EXTRA]]
BUILD = PROJECT["build-system"]["requires"]
# Of Python: 3.11, 3.12, …
VERSIONS = re.findall(
    r"^Programming Language :: Python :: (3\.\d+)$",
    "\n".join(PROJECT["project"]["classifiers"]),
    re.MULTILINE,
)


def version_of(lines: str) -> str:
    match = re.match(r"[^=]+==([^ ;\\]+)", lines)
    assert match is not None
    return match[1]


# --- debian/pins ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "wanted"), [("run", RUN), ("build", BUILD)])
def test_pins_are_what_pyproject_allows(name: str, wanted: list[str]) -> None:
    """After a change there, run scripts/pins."""
    pinned = pins(PINS / f"{name}.txt")
    for requirement in map(Requirement, wanted):
        version = version_of(pinned[canonical(requirement.name)])
        assert requirement.specifier.contains(version), (str(requirement), version)


def needed(requirements: list[str], pinned: dict[str, str]) -> Iterator[str]:
    """What these need on any Python, directly or not, by what is installed here. The needs of a
    version that is older than its pin (scripts/test --lowest) are not those of the pinned one."""
    waiting, seen = list(map(Requirement, requirements)), set[str]()
    while waiting:
        each = waiting.pop()
        name, marker = canonical(each.name), each.marker
        places = [{"python_version": version, "extra": ""} for version in VERSIONS]
        if name in seen or (marker and not any(map(marker.evaluate, places))):
            continue
        seen.add(name)
        yield name
        installed = importlib.metadata.distribution(name)
        if name in pinned and Version(installed.version) < Version(version_of(pinned[name])):
            continue
        waiting += map(Requirement, installed.requires or [])


@pytest.mark.parametrize(("name", "wanted"), [("run", RUN), ("build", BUILD)])
def test_all_that_is_needed_is_pinned(name: str, wanted: list[str]) -> None:
    pinned = pins(PINS / f"{name}.txt")
    assert "3.11" in VERSIONS
    assert set(needed(wanted, pinned)) <= set(pinned)


def test_the_data_path_is_compiled_with_what_it_runs_with() -> None:
    run, build = pins(PINS / "run.txt"), pins(PINS / "build.txt")
    assert run.keys() & build.keys() >= {"trio", "outcome", "prometheus-client"}
    assert {name: run[name] for name in run.keys() & build.keys()} == {
        name: build[name] for name in run.keys() & build.keys()
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a==1\n", "a has no hash"),
        ("a==1 \\\n    --hash=md5:00\n", "a has no hash"),
        ("a>=1 \\\n    --hash=sha256:00\n", "no version: a>=1"),
    ],
)
def test_what_is_no_pin(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.txt").write_text(text)
    with pytest.raises(SystemExit, match=re.escape(said)):
        pins(tmp_path / "run.txt")


def test_wrong_arguments() -> None:
    for words in (["--frobnicate"], ["--days"], ["--days", "soon"]):
        done = subprocess.run([ROOT / "scripts" / "pins", *words], capture_output=True, check=False)
        assert done.returncode == 7, words


# --- what comes from the index --------------------------------------------------------------------


class Shelf:
    """An index with one package in a directory, and what pip said."""

    def __init__(self, directory: Path) -> None:
        self._place = directory / "index"
        self._place.mkdir()
        wheel = self._place / "thing-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("thing.py", "")
            archive.writestr(
                "thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"
            )
            archive.writestr(
                "thing-1.0.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr("thing-1.0.dist-info/RECORD", "")
        self.hash = hashlib.sha256(wheel.read_bytes()).hexdigest()
        self.index = Index(Path(sys.executable), directory, self._run)
        self.said = ""

    def _run(self, *words: object) -> None:
        settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self._place)}
        done = subprocess.run(
            list(map(str, words)), capture_output=True, text=True, check=False,
            env={**os.environ, **settings},
        )  # fmt: skip
        self.said = done.stderr
        done.check_returncode()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_a_file_with_its_hash_is_taken(shelf: Shelf) -> None:
    shelf.index.fetch([f"thing==1.0 --hash=sha256:{shelf.hash}\n"])
    for place in (shelf.index.archives, shelf.index.wheels):
        assert [path.name for path in place.iterdir()] == ["thing-1.0-py3-none-any.whl"]


def test_where_the_distribution_has_everything(shelf: Shelf, tmp_path: Path) -> None:
    """Nothing is fetched, and there is a bill of materials all the same: as on Debian 13."""
    made = bill([distribution(tmp_path / "site", "iserblk")], shelf.index.archives)
    assert made["metadata"]["component"]["name"] == "iserblk"
    assert made["components"] == []


def test_a_file_with_another_hash_is_refused(shelf: Shelf) -> None:
    tampered = f"{int(shelf.hash[:1], 16) ^ 1:x}{shelf.hash[1:]}"
    with pytest.raises(subprocess.CalledProcessError):
        shelf.index.fetch([f"thing==1.0 --hash=sha256:{tampered}\n"])
    assert "DO NOT MATCH THE HASHES" in shelf.said
    assert list(shelf.index.archives.iterdir()) == [] and not shelf.index.wheels.exists()


def test_without_a_hash_nothing_is_taken(shelf: Shelf) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        shelf.index.fetch(["thing==1.0\n"])
    assert "require-hashes" in shelf.said or "hash" in shelf.said


def test_what_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the distribution has in a version that is allowed is not."""
    ours, system = tmp_path / "ours", tmp_path / "system"
    there = {
        each.metadata["Name"]: each
        for each in (
            distribution(
                ours, "iserblk", "a>=1", "old>=2", "none>=3", 'f>=3; extra == "fuse"',
                'x; extra == "tests"', 'y; python_version < "3"',
            ),
            distribution(ours, "a", "deep<5", "b!=1.5,>=1.2"),
            distribution(system, "b", "of-the-system", version="1.5"),
            distribution(system, "old", version="1.9"),
            distribution(system, "f", version="3.1"),
        )
    }  # fmt: skip

    def find(name: str) -> Distribution:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("importlib.metadata.distribution", find)
    monkeypatch.setattr(deb_environment, "DISTRIBUTIONS", system)
    assert lacking("iserblk") == [
        ("b", "!=1.5,>=1.2"), ("deep", "<5"), ("none", ">=3"), ("old", ">=2"),
    ]  # fmt: skip
