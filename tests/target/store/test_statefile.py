"""State files: what is there after each step, and after failures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from iserblk.target.store.statefile import StateFile


def saved(path: Path) -> bytes | None:
    return StateFile.beside(str(path)).load()


def save(state: StateFile, content: bytes | None) -> bool:
    """Whether there was something to do."""
    step = state.to_save(content)
    if step is not None:
        step()
    return step is not None


def test_content_comes_and_goes(tmp_path: Path) -> None:
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    assert state.load() is None and not save(state, None)
    assert save(state, b"one") and saved(lun) == b"one"
    assert not save(state, b"one")
    assert save(state, b"two") and saved(lun) == b"two"
    assert os.listdir(tmp_path) == ["lun.reservations"]
    assert state.path.stat().st_mode & 0o777 == 0o600
    assert save(state, None) and os.listdir(tmp_path) == []


def test_it_is_beside_the_file_and_not_beside_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "lun").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "lun")
    assert StateFile.beside(str(tmp_path / "link")).path == tmp_path / "there/lun.reservations"


def test_threads_in_another_order(tmp_path: Path) -> None:
    """The older of two changes does not win because its thread came later."""
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    old, new = state.to_save(b"old"), state.to_save(b"new")
    assert old is not None and new is not None
    new()
    old()
    assert saved(lun) == b"new"


def test_a_return_to_what_is_saved_is_noted_while_another_content_is_under_way(
    tmp_path: Path,
) -> None:
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    assert save(state, b"one")
    two, one = state.to_save(b"two"), state.to_save(b"one")
    assert two is not None and one is not None
    two()
    one()
    assert saved(lun) == b"one"


def test_a_failure_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    assert save(state, b"one")
    with monkeypatch.context() as patch:

        def fail(fd: int) -> None:
            raise OSError("no space")

        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            save(state, b"two")
    assert saved(lun) == b"one" and os.listdir(tmp_path) == ["lun.reservations"]
    assert save(state, b"two") and saved(lun) == b"two", "it is tried again"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "lun.reservations").mkdir()
    with pytest.raises(BadArgument, match=r"lun\.reservations"):
        saved(tmp_path / "lun")
