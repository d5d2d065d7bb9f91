"""scripts/installed.py: what it makes, and what it compares. It is run by scripts/distros."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installed import KEPT, Failed, Snapshot, later_package, later_wheel

from tests.support.nbdkit import need
from tests.support.target import ROOT

MODULE = 'A = 1\n__version__ = "1.2"\n'


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "iserblk-1.2-cp313-cp313-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in {
            "iserblk/__init__.py": MODULE,
            "iserblk/url.py": "Version = 1.2\n",
            "iserblk-1.2.data/data/share/iserblk/install-units": "#!/bin/sh\n",
            "iserblk-1.2.dist-info/METADATA": "Name: iserblk\nVersion: 1.2\nX: y\n\nVersion: 1.2\n",
            "iserblk-1.2.dist-info/RECORD": "of the first version\n",
        }.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name.endswith("units") else 0o644) << 16
            file.writestr(info, text)
    return path


def test_a_later_wheel_is_a_whole_one(wheel: Path, tmp_path: Path) -> None:
    made, version = later_wheel(wheel, tmp_path)
    assert version == "1.2.post1"
    assert made.name == "iserblk-1.2.post1-cp313-cp313-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(made) as file:
        names = file.namelist()
        assert sorted(names) == [
            "iserblk-1.2.post1.data/data/share/iserblk/install-units",
            "iserblk-1.2.post1.dist-info/METADATA",
            "iserblk-1.2.post1.dist-info/RECORD",
            "iserblk/__init__.py",
            "iserblk/url.py",
        ]
        assert file.getinfo(names[2]).external_attr >> 16 == 0o755
        assert file.read("iserblk/__init__.py").decode() == MODULE.replace("1.2", version)
        assert file.read("iserblk/url.py") == b"Version = 1.2\n"
        metadata = file.read("iserblk-1.2.post1.dist-info/METADATA").decode()
        assert metadata == "Name: iserblk\nVersion: 1.2.post1\nX: y\n\nVersion: 1.2\n"
        record = file.read("iserblk-1.2.post1.dist-info/RECORD").decode().splitlines()
        assert len(record) == len(names)
        for line in record[:-1]:
            name, digest, size = line.split(",")
            data = file.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={expected}", str(len(data)))
        assert record[-1] == "iserblk-1.2.post1.dist-info/RECORD,,"


def test_a_wheel_without_a_version(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "iserblk-1-py3-none-any.whl", "w") as file:
        file.writestr("iserblk/__init__.py", "")
    with pytest.raises(Failed, match="no version"):
        later_wheel(tmp_path / "iserblk-1-py3-none-any.whl", tmp_path)


def test_a_later_package_is_a_whole_one(tmp_path: Path) -> None:
    need("dpkg-deb", "dpkg")
    if os.geteuid() != 0:
        pytest.skip("scripts/installed.py runs as root")
    tree = tmp_path / "tree"
    module = tree / "usr/lib/iserblk/iserblk/__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text(MODULE)
    (tree / "DEBIAN").mkdir()
    control = (
        "Package: iserblk\nVersion: 1.2~1+deb13\nArchitecture: all\nMaintainer: x <x@x.example>\n"
    )
    (tree / "DEBIAN/control").write_text(f"{control}Description: x\n")
    name = "usr/lib/iserblk/iserblk/__init__.py"
    digest = hashlib.md5(MODULE.encode(), usedforsecurity=False).hexdigest()
    (tree / "DEBIAN/md5sums").write_text(f"{digest}  {name}\n{digest}  usr/other\n")
    first = tmp_path / "first.deb"
    subprocess.run(["dpkg-deb", "--build", tree, first], check=True, stdout=subprocess.DEVNULL)
    made, version = later_package(first, tmp_path)
    assert version == "1.2.post1"
    subprocess.run(["dpkg-deb", "--raw-extract", made, tmp_path / "made"], check=True)
    changed = MODULE.replace("1.2", version)
    assert (tmp_path / "made" / name).read_text() == changed
    new = hashlib.md5(changed.encode(), usedforsecurity=False).hexdigest()
    sums = (tmp_path / "made/DEBIAN/md5sums").read_text()
    assert sums == f"{new}  {name}\n{digest}  usr/other\n"
    found = subprocess.run(
        ["dpkg-deb", "--field", made, "Version"], check=True, capture_output=True, text=True
    ).stdout.strip()
    subprocess.run(["dpkg", "--compare-versions", found, "gt", "1.2~1+deb13"], check=True)


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/var/lib/dpkg/status", True),
        ("/home/someone/.cache/pip/http/x", True),
        ("/usr/lib/python3/dist-packages/__pycache__/six.pyc", True),
        ("/srv/installed/steps/lun0", True),
        ("/etc/iserblk/disk.conf", False),
        ("/etc/systemd/system/iserblk-attach@.service", False),
        ("/run/iserblk/nbd0/socket", False),
        ("/home/someone/.local/bin/iserblk", False),
        ("/tmp/iserblk-fusectl.x", False),
    ],
)
def test_what_counts_as_left(path: str, kept: bool) -> None:
    assert (KEPT.match(path) is not None) == kept


def snapshot(**fields: object) -> Snapshot:
    made = Snapshot.__new__(Snapshot)
    empty: dict[str, object] = {"files": {}, "processes": {}}
    empty |= {"packages": set(), "users": set(), "mounts": set()}
    for name, value in {**empty, **fields}.items():
        setattr(made, name, value)
    return made


def test_every_change_is_told() -> None:
    before = snapshot(
        files={"/a": (1, 0, 0, 5), "/b": (1, 0, 0, 5), "/c": (1, 0, 0, 5)},
        processes={1: "init", 7: "old"}, packages={"fuse3 ok"}, users={"root"}, mounts={"/ /x"},
    )  # fmt: skip
    after = snapshot(
        files={"/a": (1, 0, 0, 5), "/b": (1, 0, 0, 6), "/d": (1, 0, 0, 0)},
        processes={1: "init", 9: "left"}, packages={"fuse3 gone"}, users={"root", "iserblk"},
    )  # fmt: skip
    assert before.changes(before) == []
    assert before.changes(after) == [
        "file /b has changed",
        "file /c is gone",
        "file /d",
        "mounts: gone: / /x",
        "packages: fuse3 gone",
        "packages: gone: fuse3 ok",
        "process left",
        "users: iserblk",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "give --wheel"), (["--wheel", "x.whl"], "as root, on a system that is thrown away")],
)
def test_it_says_why_it_does_nothing(arguments: list[str], words: str) -> None:
    script = (
        "import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = sys.argv[1:];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, ROOT / "scripts/installed.py", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
