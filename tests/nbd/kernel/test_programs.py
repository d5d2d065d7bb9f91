"""Programs of the distribution: where they are found, and what is made of their last words."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.errors import IserblkError
from iserblk.nbd.kernel import programs
from iserblk.nbd.kernel.programs import (
    last_line,
    nbdkit_environment,
    nbdkit_program,
    program,
    search_path,
    signals_held,
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put(path: Path, name: str, mode: int = 0o755) -> str:
    (path / name).write_text("#!/bin/sh\n")
    (path / name).chmod(mode)
    return str(path / name)


def test_programs_for_root_are_found_without_path(path: Path) -> None:
    assert search_path().split(":") == [str(path), "/usr/sbin", "/sbin"]


def test_a_program_is_taken_from_path(path: Path) -> None:
    made = put(path, "iserblk-test-program")
    assert program("iserblk-test-program", "some-package") == made
    assert put(path, "nbdkit") == nbdkit_program()


@pytest.mark.parametrize("there", [False, True], ids=["missing", "not executable"])
def test_a_missing_program_names_its_package(path: Path, there: bool) -> None:
    if there:
        put(path, "iserblk-test-program", 0o644)
    with pytest.raises(IserblkError) as raised:
        program("iserblk-test-program", "some-package")
    assert "iserblk-test-program" in str(raised.value) and "some-package" in str(raised.value)


def test_nbdkit_finds_the_python_of_the_distribution_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else of the environment changes, and PATH is changed for nbdkit alone."""
    monkeypatch.setenv("ISERBLK_TEST", "kept")
    before = dict(os.environ)
    made = nbdkit_environment()
    assert made["PATH"] == f"/usr/bin:{path}"
    assert {**made, "PATH": before["PATH"]} == before == dict(os.environ)
    monkeypatch.delenv("PATH")
    assert nbdkit_environment()["PATH"] == f"/usr/bin:{os.defpath}"


def test_the_plugin_is_there() -> None:
    assert programs.PLUGIN.is_file()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("first\nlast\n", "last"),
        ("first\n  last  \n\n \n", "last"),
        ("Error: no such disk\nTry --help\n", "no such disk"),
        ("Error: one\nError: two\nTry --help\n", "two"),
        ("an Error: inside\nlast\n", "last"),
    ],
)
def test_last_words(said: str, line: str) -> None:
    assert last_line(said) == line


@pytest.mark.parametrize("said", ["", "\n \n"])
def test_a_program_that_said_nothing(said: str) -> None:
    assert last_line(said)


class Interrupted(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that came through; the handlers raise, as ours do."""
    came: list[int] = []

    def handler(number: int, _frame: object) -> None:
        came.append(number)
        raise Interrupted

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    yield came
    for number, old in zip(numbers, before, strict=True):
        signal.signal(number, old)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_end_of_the_block(handled: list[int], number: int) -> None:
    reached = False
    with pytest.raises(Interrupted), signals_held():
        signal.raise_signal(number)
        reached = True
        assert not handled
    assert reached and handled == [number]
    with pytest.raises(Interrupted):
        signal.raise_signal(number)


def test_of_several_signals_the_first_counts(handled: list[int]) -> None:
    with pytest.raises(Interrupted), signals_held():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert handled == [signal.SIGTERM]


def test_without_a_signal_nothing_is_left(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals_held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ZeroDivisionError), signals_held():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before and not handled


def test_other_threads_get_no_signals(handled: list[int]) -> None:
    """Only the main thread may set handlers; a block in another thread just runs."""
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with signals_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before] and not handled
