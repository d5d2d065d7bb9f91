"""Where sockets of metrics are, and which of them count."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iserblk.metrics import address, places
from iserblk.metrics.address import socket_of
from iserblk.metrics.places import Place, directories, in_directory, named, of_others

UID = str(os.geteuid())


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes sockets in a directory of their own."""
    made = []
    folder = tmp_path / "iserblk"
    folder.mkdir()

    def make(place: str) -> Path:
        sock = socket.socket(socket.AF_UNIX)
        made.append(sock)
        path = socket_of(place, folder)
        sock.bind(str(path))
        return path

    yield make
    for sock in made:
        sock.close()


def test_sockets_in_a_directory(make: Callable[[str], Path]) -> None:
    paths = [make("/dev/nbd0"), make("/mnt/x y")]
    source = in_directory(paths[0].parent)
    assert source is not None
    assert set(source.places) == {
        Place("/dev/nbd0", UID, paths[0]),
        Place("/mnt/x y", UID, paths[1]),
    }
    assert (source.own, source.left_out) == (True, 0)


def test_other_files_do_not_count(make: Callable[[str], Path], tmp_path: Path) -> None:
    """Nor links: to what is not of iserblk, or to what is."""
    good = make("/dev/nbd0")
    folder = good.parent
    (folder / "a.metrics").write_text("no socket")
    (folder / "b.metrics").symlink_to(good)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "other"))
        source = in_directory(folder)
        assert source is not None
        assert [each.where for each in source.places] == ["/dev/nbd0"]
    (tmp_path / "link").symlink_to(folder)
    through = in_directory(tmp_path / "link")
    assert through is None or not through.places
    assert in_directory(tmp_path / "missing") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to other users")
def test_sockets_of_others_do_not_count(make: Callable[[str], Path]) -> None:
    mine, theirs = make("/dev/nbd0"), make("/dev/nbd1")
    os.chown(theirs, 1234, 1234)
    source = in_directory(mine.parent)
    assert source is not None and [each.where for each in source.places] == ["/dev/nbd0"]
    os.chown(mine.parent, 1234, 1234)
    source = in_directory(mine.parent)
    assert source is not None
    assert source.places == (Place("/dev/nbd1", "1234", theirs),)
    assert not source.own
    assert source.answer_bytes == places.OTHERS_BYTES


def test_too_many(make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "OWN_PLACES", 2)
    for number in range(5):
        path = make(f"/dev/nbd{number}")
    source = in_directory(path.parent)
    assert source is not None
    assert [each.where for each in source.places] == ["/dev/nbd0", "/dev/nbd1"]
    assert source.left_out == 3


def test_places_that_are_named(make: Callable[[str], Path], tmp_path: Path) -> None:
    path = make("/dev/nbd0")
    found = named([path, ("127.0.0.1", 9), ("::1", 9), tmp_path / "missing"]).places
    assert [(each.where, each.uid) for each in found] == [
        (str(path), UID),
        ("127.0.0.1:9", ""),
        ("[::1]:9", ""),
        (str(tmp_path / "missing"), UID),
    ]
    assert all(each.named for each in found)


def test_whose_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "USERS", tmp_path)
    monkeypatch.setattr(address, "_RUN", tmp_path / "root")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "1000"))
    for name in ("1000", "1001", "x"):
        (tmp_path / name / "iserblk").mkdir(parents=True)
    of_users = [tmp_path / "1000/iserblk", tmp_path / "1001/iserblk"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert directories() == [tmp_path / "root", *of_users]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert directories() == [of_users[0]]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert directories() == []


def test_directories_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_RUN", tmp_path / "root")
    monkeypatch.setattr(address, "UNITS", ())
    monkeypatch.setattr(places, "USERS", tmp_path / "users")
    for user in ("1000", "1001"):
        (tmp_path / "users" / user).mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "users/1000"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert of_others() == [tmp_path / "root", tmp_path / "users/1001/iserblk"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert of_others() == []


def test_of_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of a unit may have no directory: the unit's own is taken, and found."""
    monkeypatch.setattr(address, "UNITS", (tmp_path,))
    monkeypatch.setattr(address, "directory", lambda: None)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    place = "/disk/socket"
    assert address.default_option(place) == {}
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}/disk:{tmp_path}/other")
    path = address.default_option(place)["metrics"]
    assert tmp_path / "disk" in directories() and Path(path).parent == tmp_path / "disk"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        source = in_directory(tmp_path / "disk")
        assert source is not None
        assert [each.where for each in source.places] == [place]


def test_a_directory_that_cannot_be_used_gives_way_to_that_of_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(address, "directory", lambda: tmp_path / "file" / "iserblk")
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    assert address.default_option("/s") == {"metrics": str(socket_of("/s", tmp_path))}
