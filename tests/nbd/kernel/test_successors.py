"""Servers of one device that follow each other, as processes, without a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iserblk.nbd.kernel.orders import READY, TAKE, TAKE_FIRST, NoHandOver, error_of
from tests.nbd.kernel.test_kernel_serving import ended, started, uses_an_export
from tests.support.nbd_load import SLOT, Load
from tests.support.target import END_S, TargetProcess, running_target
from tests.support.until import until_blocking

CONNECTIONS = 3
DEPTH = 12
SIZE = CONNECTIONS * DEPTH * SLOT


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/lun:size={SIZE}"], files / "log") as process:
        yield process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    home = tmp_path / "nbd0"
    home.mkdir(mode=0o700)
    return home / "socket"


@contextmanager
def loaded(path: Path) -> Iterator[list[Load]]:
    loads = [Load(path, number * DEPTH, DEPTH) for number in range(CONNECTIONS)]
    try:
        yield loads
    finally:
        for load in loads:
            load.stop()


def go_on(loads: list[Load]) -> None:
    """Wait until each has had many answers more."""
    before = [load.answered for load in loads]
    until_blocking(
        lambda: all(load.answered > was + DEPTH for load, was in zip(loads, before, strict=True))
    )


@pytest.mark.parametrize(
    ("how", "options", "count"),
    [
        (TAKE, "", 3),
        pytest.param(TAKE_FIRST, "", 10, marks=pytest.mark.long),
        (TAKE_FIRST, "?reserve=exclusive", 3),
    ],
)
def test_one_server_after_the_other(
    how: str, options: str, count: int, target: TargetProcess, path: Path
) -> None:
    """Every request is answered once."""
    words = (f"uri={target.url}/0{options}", f"metrics={path.parent}/metrics")
    server, said = started(path, *words)
    assert said == READY
    with loaded(path) as loads:
        for _ in range(count):
            go_on(loads)
            old = server
            server, said = started(path, *words, how=how)
            assert said == READY, error_of(said)
            assert ended(old) == (0, b"")
            assert {each.name for each in path.parent.iterdir()} == {
                *("socket", "successors", "metrics")
            }
        go_on(loads)
    assert ended(server) == (0, b"")
    assert [*path.parent.iterdir()] == []


def test_a_successor_that_cannot_serve(target: TargetProcess, path: Path) -> None:
    """The old server goes on as if nothing had been."""
    server, said = started(path, f"uri={target.url}/0", "metrics=off")
    assert said == READY
    with loaded(path) as loads:
        other, said = started(path, f"uri={target.url}/9", "metrics=off", how=TAKE)
        assert "no LUN 9" in str(error_of(said))
        assert ended(other) == (21, b"")
        go_on(loads)
        assert server.poll() is None
    assert ended(server) == (0, b"")


def test_a_successor_that_fails_when_it_has_taken_over(target: TargetProcess, path: Path) -> None:
    """``attach`` learns that there is no server any more."""
    server, said = started(path, f"uri={target.url}/0", "metrics=off")
    assert said == READY
    with uses_an_export(path):
        other, said = started(path, f"uri={target.url}/9", "metrics=off", how=TAKE_FIRST)
        refused = error_of(said)
        assert isinstance(refused, NoHandOver)
        assert "no LUN 9" in str(refused)
        assert ended(other) == (1, b"")
        assert ended(server) == (0, b"")


def test_the_old_server_is_killed(target: TargetProcess, path: Path) -> None:
    """What it has left is removed, and the next successor is not kept waiting."""
    words = (f"uri={target.url}/0", f"metrics={path.parent}/metrics")
    server, said = started(path, *words)
    assert said == READY
    with uses_an_export(path) as client:
        server.kill()
        server.wait(END_S)
        assert server.stderr is not None
        server.stderr.close()
        assert client.recv(1) == b""
        other, said = started(path, *words, how=TAKE)
        assert isinstance(error_of(said), NoHandOver)
        assert ended(other)[1] == b""
    server, said = started(path, *words)
    assert said == READY
    uses_an_export(path).close()
    assert ended(server) == (0, b"")
