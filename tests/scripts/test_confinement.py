"""What the units of Debian's package confine: under a systemd, what is forbidden is tried with each
unit's own settings, and each does its work. (iserblk-attach@ does its in tests/lab, where NBD
devices are.)"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest

from tests.support.confined import REFUSALS, allowed, unconfined, unit_settings
from tests.support.fuse import need_fuse
from tests.support.manager import Manager, running_manager
from tests.support.nbdkit import need

IQN = "iqn.2026-11.example:disk"
URL = f"iscsi://127.0.0.1/{IQN}/0"
MIB = 1 << 20


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """With a target that serves one LUN."""
    with running_manager(tmp_path_factory.mktemp("manager"), unit_settings()) as manager:
        config = manager.path("/etc/iserblk/disk.toml")
        config.write_text(f'iqn = "{IQN}"\n[lun.0]\nfile = "/var/lib/iserblk/disk"\nsize = "8M"\n')
        config.chmod(0o644)
        manager.start("iserblk-target@disk")
        yield manager
        manager.stop("iserblk-target@disk")


# What a unit may do, of what is tried. The last two have no view of their own of the file system:
# iserblk-mount@ must mount for all, and iserblk-attach@ must see what is mounted from its device.
# They may do what the owner of root's files may, and nothing with those of other users.
ROOTS_OWN = (
    "write /etc", "write /usr", "write /var/lib", "read a secret of root", "read /etc/shadow",
    "change a setting of the kernel", "make a group of processes", "run a program that it wrote",
)  # fmt: skip
WITHIN = {
    "nbd": ("run a program that it wrote",),
    "target": ("run a program that it wrote",),
    "exporter": ("run a program that it wrote",),
    # libfuse 3.17, of Debian 13, calls setuid of root by root before mount(8) notes the mount.
    "mount": (*ROOTS_OWN, "mount", "run as the same user"),
    "attach": ROOTS_OWN,
}


@pytest.fixture(scope="module")
def able(manager: Manager) -> dict[str, str]:
    return unconfined(manager)


def test_what_is_tried_works_where_nothing_is_confined(able: dict[str, str]) -> None:
    """Else a refusal would say nothing about a unit."""
    assert {name: how for name, how in able.items() if how in REFUSALS} == {}


@pytest.mark.parametrize("unit", WITHIN)
def test_what_is_forbidden(manager: Manager, able: dict[str, str], unit: str) -> None:
    """Everything that is tried, except what the table names."""
    assert allowed(manager, unit, able) == dict.fromkeys(WITHIN[unit], "done")


def test_the_target_and_the_nbd_server_do_their_work(manager: Manager) -> None:
    need("nbdcopy")
    manager.path("/etc/iserblk/lun.conf").write_text(f"URL={URL}\nOPTIONS=io-timeout=30\n")
    manager.start("iserblk-nbd@lun")
    data = os.urandom(MIB) + bytes(7 * MIB)
    manager.path("/run/data").write_bytes(data)
    uri = "nbd+unix:///?socket=/run/iserblk-nbd/lun/socket"
    manager.run("nbdcopy", "--flush", "/run/data", uri)
    manager.run("nbdcopy", uri, "/run/back")
    assert manager.path("/run/back").read_bytes() == data
    manager.stop("iserblk-nbd@lun")
    assert manager.path("/var/lib/iserblk/disk").read_bytes() == data
    manager.run("systemctl", "reload", "iserblk-target@disk")


def test_the_nbd_server_has_a_secret_that_root_alone_can_read(manager: Manager) -> None:
    manager.path("/etc/iserblk/private.toml").write_text(
        'iqn = "iqn.2026-11.example:private"\n[[portal]]\nlisten = "127.0.0.1:3261"\n'
        '[account.host]\nsecret = "a secret of one host"\n'
        '[lun.0]\nfile = "/var/lib/iserblk/private"\nsize = "8M"\n'
    )
    manager.run("chown", "iserblk:", "/etc/iserblk/private.toml")
    manager.run("chmod", "600", "/etc/iserblk/private.toml")
    secret = manager.path("/etc/credstore/iserblk-private.chap")
    secret.parent.mkdir(mode=0o700, exist_ok=True)
    secret.write_text("a secret of one host\n")
    secret.chmod(0o600)
    manager.path("/etc/iserblk/private.conf").write_text(
        "URL=iscsi://host@127.0.0.1:3261/iqn.2026-11.example:private/0\n"
        "OPTIONS=chap-secret-credential=iserblk-private.chap\n"
    )
    manager.start("iserblk-target@private")
    manager.start("iserblk-nbd@private")
    manager.stop("iserblk-nbd@private")
    manager.stop("iserblk-target@private")


def test_the_nbd_server_sees_another_writer_that_is_hidden_from_it(manager: Manager) -> None:
    """It runs as a user, and is shown no process of root in /proc."""
    manager.path("/etc/iserblk/lun.conf").write_text(f"URL={URL}\n")
    manager.run("iserblk", "nbd", "--socket", "/run/s", "--background", "--pidfile", "/run/p", URL)
    manager.start("iserblk-nbd@lun")
    pid = manager.path("/run/p").read_text().strip()
    assert f"written to by process {pid} (iserblk nbd at /run/s), too" in manager.said()
    manager.stop("iserblk-nbd@lun")
    manager.run("kill", pid)


def test_the_exporter_does_its_work(manager: Manager) -> None:
    manager.path("/etc/iserblk/lun.conf").write_text(f"URL={URL}\n")
    manager.start("iserblk-nbd@lun")
    manager.start("iserblk-exporter")
    program = (
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:13260/metrics').read())"
    )
    said = manager.run("/usr/bin/python3", "-c", program).stdout
    assert "iserblk-nbd/lun" in said and "iserblk_up" in said
    manager.stop("iserblk-exporter")
    manager.stop("iserblk-nbd@lun")


def test_the_mount_does_its_work(manager: Manager) -> None:
    need_fuse()
    manager.path("/run/luns").mkdir(exist_ok=True)
    manager.path("/etc/iserblk/files.conf").write_text(
        f"URL={URL}\nMOUNTPOINT=/run/luns\nOPTIONS=io-timeout=30\n"
    )
    manager.start("iserblk-mount@files")
    manager.run(
        "dd", "if=/dev/urandom", "of=/run/luns/lun0", "bs=64k", "count=16", "conv=notrunc,fsync"
    )
    digest = manager.run("sha256sum", "/run/luns/lun0").stdout.split()[0]
    manager.stop("iserblk-mount@files")
    assert not manager.path("/run/luns/lun0").exists()
    lun = manager.path("/var/lib/iserblk/disk").read_bytes()
    assert hashlib.sha256(lun).hexdigest() == digest
