"""State files: what is there after each step, and after failures."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from iserblk.target.store.statefile import MAXIMUM_SIZE, Damaged, StateFile


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


@pytest.mark.parametrize("before", [b"one", None])
def test_a_directory_that_fails_behind_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None
) -> None:
    """The file has its new content then, or is gone: a return to the old content is a change."""
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    save(state, before)
    fsync = os.fsync

    def fail(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "I/O error")
        fsync(fd)

    for content in (b"two", None) if before else (b"two",):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="I/O error"):
                save(state, content)
        assert save(state, before), "what the file has is not known"
        assert saved(lun) == before


def test_as_much_is_read_as_is_written(tmp_path: Path) -> None:
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    assert save(state, bytes(MAXIMUM_SIZE)) and saved(lun) == bytes(MAXIMUM_SIZE)
    with pytest.raises(ValueError, match="no start would read"):
        state.to_save(bytes(MAXIMUM_SIZE + 1))
    assert saved(lun) == bytes(MAXIMUM_SIZE)


@pytest.mark.parametrize("content", [None, b"two"])
def test_a_file_that_is_too_long_is_replaced_or_removed(
    tmp_path: Path, content: bytes | None
) -> None:
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    state.path.write_bytes(bytes(MAXIMUM_SIZE + 1))
    with pytest.raises(Damaged, match="bytes"):
        state.load()
    assert save(state, content) and saved(lun) == content


def test_blocks_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lun = tmp_path / "lun"
    state = StateFile.beside(str(lun))
    state.path.write_bytes(b"one")
    with monkeypatch.context() as patch:

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "I/O error")

        patch.setattr(os, "open", fail)
        with pytest.raises(Damaged, match="I/O error"):
            state.load()
    assert save(state, None) and saved(lun) is None


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lun.reservations")
    assert saved(tmp_path / "lun") == b""
