"""systemd's unit for targets: it runs, reads its file again, and does with what it is left."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from iserblk.metrics.address import UNITS
from tests.cli.commands import good, good_json
from tests.support.nbdkit import need
from tests.support.target import END_S, IQN, ROOT
from tests.support.unit import Unit
from tests.support.until import until_blocking

UNIT = "iserblk-target@.service"
FILE = "/etc/iserblk/%i.toml"
# Of 100: 96 is a service without any hardening. It is root's, and has the network.
EXPOSURE = 20
ZERO = '[lun.0]\nfile = "zero"\nsize = "1M"\n'
HEAD = f'iqn = "{IQN}"\nportal = [{{ listen = "127.0.0.1:0" }}]\n'
SYSTEM_CALL = re.compile(r"^[0-9]+ +([a-z][a-z0-9_]*)\(", re.MULTILINE)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as it is installed, with the file of another directory."""
    (tmp_path / "ones").write_bytes(b"\x11" * (1 << 20))
    root = tmp_path / "root"
    done = subprocess.run(
        [ROOT / "scripts/install-units", "--root", root], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    path = root / "etc/systemd/system" / UNIT
    text = path.read_text()
    assert text.count(FILE) == 2
    path.write_text(text.replace(FILE, str(tmp_path / "target.toml")))
    return path


def test_the_unit(unit: Path, tmp_path: Path) -> None:
    """From READY=1, over a reload under a session, to SIGTERM."""
    file = tmp_path / "target.toml"
    file.write_text(HEAD + ZERO)
    with Unit(unit, {}).started(tmp_path) as process:
        assert process.stdout is not None
        _, _, url = process.stdout.readline().strip().partition(" ")
        good("copy", tmp_path / "ones", f"{url}/0")
        file.write_text(HEAD + ZERO + ZERO.replace("0]", "3]").replace("zero", "three"))
        reload = Unit(unit, {"MAINPID": str(process.pid)})
        assert reload.run("ExecReload").returncode == 0

        def luns() -> list[int]:
            return [disk["lun"] for disk in good_json("info", url)["disks"]]

        until_blocking(lambda: luns() == [0, 3])
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == int(reload.setting("SuccessExitStatus"))
    assert (tmp_path / "zero").read_bytes() == b"\x11" * (1 << 20)


def test_its_metrics_are_where_stats_and_the_exporter_look(unit: Path) -> None:
    assert Path("/run", Unit(unit, {}).setting("RuntimeDirectory")).parent in UNITS


def test_it_is_hardened(unit: Path) -> None:
    need("systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}",
         "--no-pager", unit],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("requires systemd-analyze security --offline: systemd 250 or later")
    assert done.returncode == 0, done.stdout


def _groups() -> dict[str, set[str]]:
    """systemd's groups of system calls, which may name other groups."""
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    group = ""
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            group = line.strip()
            found[group] = set()
        elif line.startswith(" ") and not line.strip().startswith("#"):
            found[group].add(line.strip())
    return found


def _allowed(filters: list[str]) -> set[str]:
    """The system calls that values of SystemCallFilter= leave, systemd.exec(5)."""
    groups = _groups()

    def calls(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        return {call for each in groups[name] for call in calls(each)}

    allowed = calls("@default")
    for value in filters:
        named = {call for each in value.removeprefix("~").split() for call in calls(each)}
        allowed = allowed - named if value.startswith("~") else allowed | named
    return allowed


def test_what_is_left_suffices(unit: Path, tmp_path: Path) -> None:
    """Every system call of a whole life is one that the unit allows, and no memory is both writable
    and executable: the filter would end the service in the middle of something."""
    need("strace", "systemd-analyze")
    calls = tmp_path / "calls"
    text = unit.read_text()
    filters = re.findall(r"^SystemCallFilter=(.*)$", text, re.MULTILINE)
    strace = f"{shutil.which('strace')} -D -f -o {calls}"  # -D: the command is the main process
    unit.write_text(text.replace("ExecStart=", f"ExecStart={strace} "))
    (tmp_path / "target.toml").write_text(
        HEAD + "slp = { answer = true, port = 0 }\n" + ZERO + 'volatile-cache = "1M"\n'
    )
    with Unit(unit, {}).started(tmp_path, END_S * 4) as process:
        assert process.stdout is not None
        _, _, url = process.stdout.readline().strip().partition(" ")
        for scheme in ("iser", "iscsi"):
            place = f"{url.replace('iser:', f'{scheme}:')}/0"
            good("copy", tmp_path / "ones", place, "--verify")
            good("trim", place, "--all")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S * 2) == 143
    traced = calls.read_text()
    used = set(SYSTEM_CALL.findall(traced))
    assert {"accept4", "pwritev2", "fallocate", "fdatasync", "flock"} <= used
    assert used <= _allowed(filters)
    assert "MemoryDenyWriteExecute=yes" in text
    assert "PROT_WRITE|PROT_EXEC" not in traced
    assert not re.search(r"mprotect\([^)]*PROT_EXEC", traced)
