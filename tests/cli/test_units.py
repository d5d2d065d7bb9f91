"""systemd's units and mount(8)'s helper. tests/lab has real devices and real mounts by mount(8)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.disk.ending import LONGEST_S
from iserblk.initiator.session.ending import AWAY_S
from tests.cli.commands import environment
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need
from tests.support.target import END_S, ROOT, TargetProcess, running_target
from tests.support.unit import Unit

UNITS = (
    "iserblk-attach@.service",
    "iserblk-mount@.service",
    "iserblk-target@.service",
    "iserblk-nbd@.service",
    "iserblk-exporter.service",
)
HELPER = "sbin/mount.iserblk"
UMOUNT_HELPER = "sbin/umount.fuse.iserblk"
RULES = "etc/udev/rules.d/59-iserblk.rules"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/lun:size=1M"], files / "log") as process:
        yield process


def install(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "install-units", "--root", root, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    done = install(root)
    assert done.returncode == 0, done.stderr
    return root


def test_installed_and_removed(root: Path) -> None:
    places = [root / "etc/systemd/system" / name for name in UNITS]
    places += [root / name for name in (HELPER, UMOUNT_HELPER, RULES)]
    assert all(path.is_file() for path in places)
    assert os.access(root / HELPER, os.X_OK) and os.access(root / UMOUNT_HELPER, os.X_OK)
    assert install(root).returncode == 0  # over its own files
    assert install(root, "--remove").returncode == 0
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sbin").mkdir()
    (tmp_path / HELPER).write_text("of another package")
    done = install(tmp_path)
    assert done.returncode == 1
    assert "is not from here" in done.stderr
    install(tmp_path, "--remove")
    assert (tmp_path / HELPER).read_text() == "of another package"


def test_from_a_wheel(tmp_path: Path) -> None:
    """The script lies in share/iserblk of an environment, and takes the programs of that."""
    prefix = tmp_path / "env"
    place = prefix / "share" / "iserblk"
    shutil.copytree(ROOT / "scripts" / "systemd", place / "systemd")
    shutil.copy(ROOT / "scripts" / "install-units", place)
    words: list[str | Path] = [place / "install-units", "--root", tmp_path / "root"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{prefix}/bin/iserblk is missing: install iserblk there again" in done.stderr
    (prefix / "bin").mkdir()
    (prefix / "bin" / "iserblk").touch(0o755)
    subprocess.run(words, capture_output=True, check=True)
    for name in UNITS:
        text = (tmp_path / "root/etc/systemd/system" / name).read_text()
        assert f"ExecStart={prefix}/bin/iserblk " in text and "@ISERBLK@" not in text
    for name in (HELPER, UMOUNT_HELPER):
        text = (tmp_path / "root" / name).read_text()
        assert f'exec {prefix}/bin/{Path(name).name} "$@"' in text


def test_wrong_arguments() -> None:
    for words in (["--frobnicate"], ["--root"]):
        done = subprocess.run(
            [ROOT / "scripts/install-units", *words], capture_output=True, check=False
        )
        assert done.returncode == 7


@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong(name: str, root: Path) -> None:
    need("systemd-analyze")
    unit = root / "etc/systemd/system" / name.replace("@", "@disk")
    (root / "etc/systemd/system" / name).rename(unit)
    for text, good in ((unit.read_text(), True), (unit.read_text() + "[Service]\nEver=1\n", False)):
        unit.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
        )
        said = [line for line in done.stderr.splitlines() if "iserblk" in line]
        assert (said == []) == good, said


# Options of systemd that give a service a mount namespace of its own, systemd.exec(5).
NAMESPACES = ("ProtectSystem=", "ProtectHome=", "Private", "ReadOnlyPaths=", "InaccessiblePaths=",
              "ProtectKernel", "ProtectControlGroups=", "ProtectProc=", "BindPaths=")  # fmt: skip
EXPOSURE = 55  # of 100: 96 is a service without any hardening


@pytest.mark.parametrize("name", UNITS[:2])
def test_units_of_luns_are_hardened(name: str, root: Path) -> None:
    """As far as that needs no mount namespace: what they mount is for all, and what is mounted is
    what they must see."""
    need("systemd-analyze")
    unit = root / "etc/systemd/system" / name
    lines = unit.read_text().splitlines()
    assert not [line for line in lines if line.startswith(NAMESPACES)]
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}",
         "--no-pager", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("requires systemd-analyze security --offline: systemd 250 or later")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [*UNITS[:2], "iserblk-nbd@.service"])
def test_a_unit_gives_its_command_the_time_that_it_takes(name: str, root: Path) -> None:
    """For a target that answers, but is slow; one that is away is given up long before."""
    unit = Unit(root / "etc/systemd/system" / name, {})
    assert int(unit.setting("TimeoutStopSec")) >= LONGEST_S + 30
    assert AWAY_S + 30 < 90  # systemd's own limit, for mounts of /etc/fstab


def test_the_module_is_loaded_for_the_attach_unit(root: Path) -> None:
    """By another unit, as this one has no right to."""
    lines = (root / "etc/systemd/system" / UNITS[0]).read_text().splitlines()
    (capabilities,) = (line for line in lines if line.startswith("CapabilityBoundingSet="))
    assert capabilities == "CapabilityBoundingSet=CAP_SYS_ADMIN"
    assert {"Wants=modprobe@nbd.service", "After=modprobe@nbd.service"} <= set(lines)


def test_the_mount_unit(root: Path, target: TargetProcess, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    given = {"URL": f"{target.url}/0", "MOUNTPOINT": str(place), "OPTIONS": "ro,io-timeout=20"}
    unit = Unit(root / "etc/systemd/system" / UNITS[1], given)
    with unit.started(tmp_path) as process:
        assert (place / "lun0").stat().st_size == 1 << 20
        done = unit.run("ExecStop")
        assert (done.returncode, done.stderr) == (0, "")
        assert process.wait(END_S) == 0
    # Nothing to do after that, nor after a refusal: another program's mount is there.
    assert unit.run("ExecStopPost", SERVICE_RESULT="exit-code").returncode == 0
    if os.geteuid():
        return  # umount --lazy is for root
    with unit.started(tmp_path) as process:
        process.kill()
        process.wait()
        assert unit.run("ExecStopPost", SERVICE_RESULT="signal").returncode == 0
        assert os.listdir(place) == []


def test_a_unit_without_options(root: Path, target: TargetProcess, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    unit = Unit(
        root / "etc/systemd/system" / UNITS[1], {"URL": target.url, "MOUNTPOINT": str(place)}
    )
    with unit.started(tmp_path) as process:
        assert os.listdir(place) == ["lun0"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0


# --- mount.iserblk -----------------------------------------------------------------------------


def helper(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "fuse_mount.helper", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=END_S * 2,
    )


def test_the_mount_helper(target: TargetProcess, tmp_path: Path) -> None:
    """The helper takes all arguments that mount(8) passes for an fstab line."""
    need_fuse()
    options = "ro,noexec,nosuid,nodev,_netdev,nofail,noauto,user,x-systemd.automount,io-timeout=20"
    done = helper(f"{target.url}/0", tmp_path, "-n", "-s", "-v", "-f", "-o", options)
    assert (done.returncode, done.stdout) == (0, "")  # mount --fake
    place = tmp_path / "place"
    place.mkdir()
    done = helper(f"{target.url}/0", place, "-n", "-o", options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    try:
        assert (place / "lun0").read_bytes() == bytes(1 << 20)
    finally:
        subprocess.run([sys.executable, "-m", "iserblk.cli", "umount", place], check=True)


@pytest.mark.parametrize(
    ("status", "words", "arguments"),
    [
        (1, "one URL and one mount point", ["iser://host/iqn.2026-11.example:disk"]),
        (1, "option -x not recognized", ["-x"]),
        (1, "namespace (-N) is not supported", ["a", "b", "-N", "/proc/1/ns/mnt"]),
        (1, "-o colour: unknown option", ["a", "/", "-o", "colour"]),
        (32, "Connection refused", ["iser://127.0.0.1:1/iqn.2026-11.example:disk/0", "{place}"]),
    ],
)
def test_what_the_mount_helper_refuses(
    status: int, words: str, arguments: list[str], tmp_path: Path
) -> None:
    need_fuse()
    done = helper(*(word.format(place=tmp_path) for word in arguments))
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert line.startswith("mount.iserblk: ")
    assert words in line
