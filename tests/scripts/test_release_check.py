"""scripts/release_check.py: each thing that a release must have is missed when it is not there."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from release_check import (
    EXTRAS,
    MANUALS,
    OTHERS,
    faults_of_archive,
    faults_of_wheel,
    files_of,
    main,
    needed,
)

from tests.support.nbdkit import need
from tests.support.target import ROOT

URL = "https://example.org/iserblk"
INFO, DATA = "iserblk-1.2.dist-info", "iserblk-1.2.data/data/share"
METADATA = "\n".join(
    [
        *("Metadata-Version: 2.4", "Name: iserblk", "Version: 1.2", "Classifier: Typing :: Typed"),
        "License-Expression: Apache-2.0",
        *(f"Project-URL: Homepage, {URL}", "Requires-Dist: trio>=0.27"),
        *('Requires-Dist: pyfuse3>=3.5; extra == "fuse"', ""),
        *(f"Provides-Extra: {extra}" for extra in sorted(EXTRAS)),
        "",
    ]
).replace("\n\n", "\n")
ENTRIES = "[console_scripts]\niserblk = a:b\nmount.iserblk = c:d\numount.fuse.iserblk = e:f\n"
MODULE = "iserblk.scsi.cdb"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    texts = {
        "iserblk/__init__.py": '__version__ = "1.2"\n',
        "iserblk/forms.py": f'LIBRARY = "iserblk__mypyc"\nMODULES = ("{MODULE}",)\n',
        "iserblk/scsi/cdb.py": "",
        "iserblk/py.typed": "",
        "iserblk/_crc.pyx": "",
        "iserblk/_crc.pyi": "",
        "fuse_mount/helper.py": "",
        "nbd_plugin/iserblk.py": "",
        "scripts/install-units": "",
        "scripts/systemd/a@.service": "",
        "monitoring/a.rules.yml": "",
        "docs/a.md": "",
        "examples/a.py": "",
        "docs/more/b.md": "",
        "LICENSE": "",
        **{f"share/{name}": "" for name in MANUALS},
    }
    for name, text in texts.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tree / "scripts/install-units").chmod(0o755)
    return tree


def library_of(path: Path, *needs: str) -> bytes:
    """An ELF library that needs others, which need not be there."""
    need("gcc", "readelf")
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = ["gcc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-x", "none"]
    others = [path.parent / name for name in needs]
    for other in others:
        subprocess.run([*empty, f"-Wl,-soname,{other.name}", "-o", other], check=True)
    subprocess.run([*empty, "-Wl,--no-as-needed", *others, "-o", path], check=True)
    return path.read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return library_of(tmp_path_factory.mktemp("plain") / "x.so", "libc.so.6")


@pytest.fixture
def whole(tree: Path, plain: bytes) -> dict[str, bytes]:
    """What a good wheel of the tree has in it."""
    files = {name: (tree / name).read_bytes() for name in files_of(tree)
             if name.startswith(("iserblk/", "fuse_mount/", "nbd_plugin/"))
             and not name.endswith(".pyx")}  # fmt: skip
    files |= {f"{DATA}/{name}": b"" for name in MANUALS}
    files |= {f"{DATA}/iserblk/install-units": b"", f"{DATA}/iserblk/systemd/a@.service": b""}
    files |= {f"{DATA}/iserblk/monitoring/a.rules.yml": b""}
    files |= {f"{DATA}/doc/iserblk/examples/a.py": b""}
    files |= {f"{DATA}/doc/iserblk/a.md": b"", f"{DATA}/doc/iserblk/more/b.md": b""}
    modules = ["iserblk__mypyc", MODULE, *OTHERS]
    files |= {f"{name.replace('.', '/')}.cpython-311-x.so": plain for name in modules}
    files |= {f"{INFO}/METADATA": METADATA.encode(), f"{INFO}/LICENSE": b""}
    files[f"{INFO}/entry_points.txt"] = ENTRIES.encode()
    return files


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def tarred(path: Path, tree: Path, change: Callable[[tarfile.TarInfo], tarfile.TarInfo | None],
           **more: str) -> Path:  # fmt: skip
    with tarfile.open(path, "w:gz") as archive:
        for name in files_of(tree):
            archive.add(tree / name, f"iserblk-1.2/{name}", filter=change)
        for name, text in {"PKG-INFO": METADATA, **more}.items():
            member = tarfile.TarInfo(f"iserblk-1.2/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_a_good_wheel(tree: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    wheel = zipped(tmp_path / "a.whl", whole)
    assert list(faults_of_wheel(wheel, tree, URL)) == []
    assert main(["--tree", str(tree), "--url", URL, str(wheel)]) == 0


def test_whatever_a_wheel_lacks_is_told(
    tree: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for name in sorted(set(whole) - {f"{INFO}/METADATA", f"{INFO}/entry_points.txt"}):
        left = {each: content for each, content in whole.items() if each != name}
        faults = list(faults_of_wheel(zipped(tmp_path / "a.whl", left), tree, URL))
        assert faults, name


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        ("METADATA", "Version: 1.2", "Version: 1.3", "Version is 1.3, and not 1.2"),
        ("METADATA", "Classifier: Typing :: Typed\n", "", "there are no classifiers"),
        ("METADATA", "License-Expression: Apache-2.0\n", "", "License-Expression is None"),
        (
            "METADATA",
            "Classifier: Typing",
            "Classifier: License :: OSI Approved :: X\nClassifier: Typing",
            "a classifier names the licence",
        ),
        ("METADATA", "Provides-Extra: verbs\n", "", "missing: the extras verbs"),
        ("METADATA", '; extra == "fuse"', "", "has to be compiled: pyfuse3"),
        ("METADATA", URL, "https://example.org", f"does not have {URL}"),
        ("entry_points.txt", "mount.iserblk = c:d\n", "", "missing: the program mount.iserblk"),
    ],
)
def test_what_the_metadata_must_say(
    name: str, old: str, new: str, fault: str, tree: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    text = whole[f"{INFO}/{name}"].decode()
    assert old in text
    whole[f"{INFO}/{name}"] = text.replace(old, new).encode()
    (told,) = faults_of_wheel(zipped(tmp_path / "a.whl", whole), tree, URL)
    assert fault in told


@pytest.mark.parametrize("name", ["tests/test_x.py", "iserblk/_crc.pyx", "iserblk/scsi/cdb.c"])
def test_a_wheel_has_no_more_than_belongs_there(
    name: str, tree: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    wheel = zipped(tmp_path / "a.whl", {**whole, name: b""})
    assert list(faults_of_wheel(wheel, tree, URL)) == [f"not for a wheel: {name}"]


@pytest.mark.parametrize(
    ("module", "library", "good"),
    [
        ("iserblk/rcap/verbs/_gaps", "libibverbs.so.1", True),
        ("iserblk/_crc", "libibverbs.so.1", False),
        ("iserblk/_crc", "libisal.so.2", False),
        ("iserblk/_crc", "libisal-0a1b2c3d.so.2.0.30", True),  # in iserblk.libs
    ],
)
def test_libraries_that_not_every_machine_has(
    module: str, library: str, good: bool, tree: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    name = f"{module}.cpython-311-x.so"
    whole[name] = library_of(tmp_path / "libraries/x.so", "libc.so.6", library)
    assert needed(tmp_path / "libraries/x.so") == ["libc.so.6", library]
    faults = list(faults_of_wheel(zipped(tmp_path / "a.whl", whole), tree, URL))
    assert faults == ([] if good else [f"{name} needs {library}"])


def test_a_good_archive(tree: Path, tmp_path: Path) -> None:
    archive = tarred(tmp_path / "a.tar.gz", tree, lambda member: member)
    assert list(faults_of_archive(archive, tree, URL)) == []


def test_whatever_an_archive_lacks_is_told(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files_of(tree):
        archive = tarred(
            tmp_path / "a.tar.gz", tree,
            lambda member: None if member.name == f"iserblk-1.2/{name}" else member,  # noqa: B023
        )  # fmt: skip
        assert f"missing: {name}" in faults_of_archive(archive, tree, URL)
        assert main(["--tree", str(tree), "--url", URL, str(archive)]) == 1
        assert f"release_check: a.tar.gz: missing: {name}\n" in capsys.readouterr().err


def test_an_archive_with_what_was_built(tree: Path, tmp_path: Path) -> None:
    archive = tarred(tmp_path / "a.tar.gz", tree, lambda member: member, **{"build/x.c": ""})
    assert list(faults_of_archive(archive, tree, URL)) == ["not of the tree: build/x.c"]


def test_a_script_of_the_archive_can_be_run(tree: Path, tmp_path: Path) -> None:
    def unset(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mode &= 0o666
        return member

    archive = tarred(tmp_path / "a.tar.gz", tree, unset)
    told = ["differs in whether it can be run: scripts/install-units"]
    assert list(faults_of_archive(archive, tree, URL)) == told


# --- scripts/release itself -----------------------------------------------------------------------


def release(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "release", *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", ""], "--output needs a directory"),
        (["--output"], "--output needs a value"),
        (["--output", "d", "--url", "http://x"], "no https address: http://x"),
        (["--output", "d", "--python", "/bin/true"], "--python /bin/true: no CPython"),
        (["--frobnicate"], "no such option: --frobnicate"),
    ],
)
def test_release_says_what_is_wrong_with_its_arguments(arguments: list[str], words: str) -> None:
    done = release(*arguments)
    assert (done.returncode, done.stdout) == (7, "")
    (line,) = done.stderr.splitlines()
    assert words in line


@pytest.mark.long
def test_release_makes_a_source_archive_of_the_whole_tree(tmp_path: Path) -> None:
    """It is checked by the script itself; and nothing is left in the checkout."""
    need("git")
    before = {path.name for path in ROOT.iterdir()}
    done = release("--output", tmp_path, "--url", URL, "--sdist-only")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as opened:
        top = archive.name.removesuffix(".tar.gz")
        names = {member.name.removeprefix(f"{top}/") for member in opened.getmembers()}
    assert {"setup.py", "iserblk/rcap/verbs/_gaps.pyx", "tests/conftest.py", "scripts/test",
            "share/man/man1/iserblk.1"} <= names  # fmt: skip
    assert {path.name for path in ROOT.iterdir()} == before


@pytest.mark.long
def test_release_makes_wheels_that_carry_data(tmp_path: Path) -> None:
    """For the Python of this environment: compiled, checked, installed and used."""
    need("git", "gcc")
    python = shutil.which("python3", path="/usr/bin")
    done = release("--output", tmp_path, "--url", URL, "--python", python)
    assert done.returncode == 0, done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".json", ".whl"]
    (bill,) = tmp_path.glob("*.whl.cdx.json")
    assert [part["name"] for part in json.loads(bill.read_text())["components"]] == ["isa-l"]
