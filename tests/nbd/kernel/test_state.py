"""What is kept about a device from attach to detach."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from iserblk.errors import Busy, IserblkError
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.state import Home, State, locked

STATE = State("iser://192.0.2.1/iqn.2026-11.example:disk/0", 12.5, 42)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    places = Directories(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc", tmp_path / "run")
    (places.sys / "block" / "nbd0").mkdir(parents=True)
    places.run.mkdir()
    return Home(Device("nbd0", places))


def test_it_comes_back_as_it_was_made(home: Home) -> None:
    assert not home.exists()
    home.make(STATE)
    assert home.exists() and home.state() == STATE
    assert stat.S_IMODE(home.directory.stat().st_mode) == 0o700


def test_making_it_afresh_removes_what_was_left(home: Home) -> None:
    home.make(STATE)
    home.server_pid.write_text("1\n")
    home.make(STATE)
    assert not home.server_pid.exists()


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"url": "x"}', '{"a": 1}'])
def test_a_state_that_was_cut_off_is_harmless(home: Home, text: str | None) -> None:
    home.make(STATE)
    (file,) = home.directory.iterdir()
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert home.state() == State("an unknown LUN", 30.0, 0)


def test_what_udev_is_told(home: Home) -> None:
    home.make(STATE)
    home.tell_udev({"ID_SERIAL": "3600", "ID_WWN": "0x600"})
    assert (home.directory / "udev").read_text() == "ID_SERIAL=3600\nID_WWN=0x600\n"
    assert home.state() == STATE
    home.remove()
    with pytest.raises(IserblkError, match="udev: No such file or directory"):
        home.tell_udev({})


def test_removing_it_twice(home: Home) -> None:
    home.make(STATE)
    home.remove()
    home.remove()
    assert not home.exists()


def test_a_directory_that_cannot_be_made(home: Home) -> None:
    home.device.directories.run.rmdir()
    with pytest.raises(IserblkError, match="nbd0: No such file or directory"):
        home.make(STATE)


@pytest.mark.parametrize(
    ("connected", "written", "ours"),
    [("4711", "4711", True), ("4711", "4712", False), ("", "4711", False), ("4711", "", False)],
)
def test_whose_the_device_is(home: Home, connected: str, written: str, ours: bool) -> None:
    home.make(STATE)
    (home.device.directories.sys / "block" / "nbd0" / "pid").write_text(connected)
    home.client_pid.write_text(written)
    assert home.is_ours() is ours


def test_one_at_a_time(home: Home) -> None:
    with locked(home.device) as one:
        assert one.directory == home.directory
        with pytest.raises(Busy, match="nbd0: another attach or detach"), locked(home.device):
            pass
    with locked(home.device):
        pass
