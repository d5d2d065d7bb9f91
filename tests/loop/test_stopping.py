"""Whether the service manager is about to end what uses a LUN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from iserblk.loop.stopping import LOOK_S, ends, is_stopping, mount_unit, own_unit, watch

UNIT = "iserblk-attach@data.service"
SHUTS_DOWN = f"""\
2290 shutdown.target          start waiting
2291 {UNIT} stop  waiting
2310 data.mount               stop  running
"""


def test_a_shutdown_ends_all() -> None:
    assert ends(SHUTS_DOWN, ())


def test_the_stop_of_a_unit_ends_what_belongs_to_it() -> None:
    jobs = f"7 {UNIT} stop waiting\n8 data.mount stop running\n"
    assert ends(jobs, {UNIT})
    assert ends(jobs, {"data.mount"})
    assert not ends(jobs, {"iserblk-attach@other.service"})
    assert ends(f"7 {UNIT} restart waiting\n", {UNIT})


@pytest.mark.parametrize(
    "jobs",
    [
        *("", "No jobs running.\n", "7\n\n", "7 shutdown.target stop waiting\n"),
        *(f"7 {UNIT} start running\n", f"7 {UNIT} reload running\n"),
    ],
)
def test_other_jobs_do_not(jobs: str) -> None:
    assert not ends(jobs, {UNIT})


def test_systemctl_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\n[ "$5" = list-jobs ] && printf "7 {UNIT} stop waiting\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert is_stopping({UNIT}, tmp_path)
    assert not is_stopping({"other.service"}, tmp_path)
    assert not is_stopping({UNIT}, tmp_path / "no-systemd")
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_stopping({UNIT}, tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        (r"0::/system.slice/system-iserblk\x2dattach.slice/" + UNIT, UNIT),
        ("12:pids:/x\n0::/system.slice/luns.mount", "luns.mount"),
        (
            "0::/user.slice/user-0.slice/user@0.service/app.slice/run-u7.scope/inner",
            "user@0.service",
        ),
        ("0::/user.slice/user-0.slice/session-3.scope", "session-3.scope"),
        ("0::/system.slice/run-u7.scope/inner.scope", "run-u7.scope"),
        ("0::/", ""),
    ],
)
def test_the_unit_of_this_process(tmp_path: Path, cgroup: str, unit: str) -> None:
    (tmp_path / "cgroup").write_text(f"{cgroup}\n")
    assert own_unit(tmp_path / "cgroup") == unit
    assert own_unit(tmp_path / "none") == ""


async def test_a_watch_looks_while_requests_wait(mock_clock: trio.testing.MockClock) -> None:
    waiting = [False, True, True, True]
    wished = [True, True, False]
    asked: list[bool] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, lambda: waiting.pop(0), lambda: wished.pop(0), asked.append)
        for count in range(4):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(LOOK_S)
            while len(asked) < count or len(waiting) > 3 - count:  # a thread has a part in it
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert asked == [True, True, False]


# What systemd-escape --path --suffix=mount prints.
@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/data", "data.mount"),
        ("/data/", "data.mount"),
        ("/", "-.mount"),
        ("/srv/my-luns/a b", r"srv-my\x2dluns-a\x20b.mount"),
        ("/.hidden", r"\x2ehidden.mount"),
        ("/ä/x.y:z_0", r"\xc3\xa4-x.y:z_0.mount"),
    ],
)
def test_the_unit_of_a_mount_point(path: str, unit: str) -> None:
    assert mount_unit(path) == unit
