"""scripts/clock: a machine that was started some seconds ago, and the tests that name a clock."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

TOP = Path(__file__).resolve().parents[2]
CLOCK = TOP / "scripts/clock"
PRINT = "import time; print(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))"


@pytest.fixture(scope="module")
def clock_script() -> ModuleType:
    loader = SourceFileLoader("clock_script", str(CLOCK))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(CLOCK), *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("age", [30, 400 * 86_400])
def test_the_clock_began_when_it_says(clock_script: ModuleType, age: int) -> None:
    why = clock_script.why_not()
    if why:
        pytest.skip(why)
    done = run(str(age), sys.executable, "-c", PRINT)
    assert not done.returncode, done.stderr
    for seconds in map(float, done.stdout.split()):
        assert age - 1 <= seconds < age + 600  # on a busy machine, too


def test_the_command_s_exit_status_is_handed_on(clock_script: ModuleType) -> None:
    why = clock_script.why_not()
    if why:
        pytest.skip(why)
    assert run("30", "sh", "-c", "exit 3").returncode == 3


@pytest.mark.parametrize("words", [[], ["30"], ["soon", "true"]])
def test_wrong_arguments_do_nothing(words: list[str]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (7, "") and "--help" in done.stderr


@pytest.mark.parametrize(
    "reason", ["package util-linux", "CONFIG_TIME_NS", "root", "not permitted"]
)
def test_why_there_can_be_no_such_clock(
    clock_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    """scripts/test says so where it leaves these tests out."""
    denied = tmp_path / "unshare"
    denied.write_text("#!/bin/sh\necho unshare: not permitted >&2\nexit 1\n")
    denied.chmod(0o755)
    found = None if "package" in reason else str(denied)
    monkeypatch.setattr(clock_script.shutil, "which", lambda _name: found)
    monkeypatch.setenv("PATH", str(tmp_path))
    if reason == "CONFIG_TIME_NS":
        monkeypatch.setattr(clock_script.Path, "exists", lambda _path: False)
    monkeypatch.setattr(clock_script.os, "geteuid", lambda: 1000 if reason == "root" else 0)
    assert reason in clock_script.why_not()


def test_a_new_module_is_found(clock_script: ModuleType, tmp_path: Path) -> None:
    """By its text, by what it takes from a module that tests share, and by its conftest.py."""
    texts = {
        "a/test_names.py": "from time import monotonic\n",
        "a/test_moves.py": "session.progress(5.0)\n",
        "a/test_waits.py": "async def test(autojump_clock): ...\n",
        "a/test_takes.py": "from tests.a.several import Bench\n",
        "a/test_takes_all.py": "from tests.a import several\n",
        "a/test_other.py": "from tests.a.severals import Bench\nPROGRESS = 'clockwork'\n",
        "a/several.py": "NOW = monotonic()\n",
        "b/conftest.py": "def fixture(clock): ...\n",
        "b/test_in_the_room.py": "",
        "lab/test_of_a_machine.py": "from time import monotonic\n",
        "conftest.py": "from time import monotonic\n",
        "test_top.py": "",
    }
    for name, text in texts.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert clock_script.test_modules(tmp_path) == [
        f"tests/{name}.py"
        for name in (
            "a/test_moves",
            "a/test_names",
            "a/test_takes",
            "a/test_takes_all",
            "a/test_waits",
            "b/test_in_the_room",
        )
    ]


def test_those_of_this_project(clock_script: ModuleType) -> None:
    found = clock_script.test_modules()
    for name in ("test_reconnecting", "session/test_logout_connection", "session/test_deadlines"):
        assert f"tests/initiator/{name}.py" in found
    assert "tests/test_layers.py" not in found  # names clocks, and has none
    assert not any(each.startswith("tests/simulation/") for each in found)  # made up altogether
