"""Where secrets are looked for, and what is said of places that cannot be read. That each kind is
found is shown by tests/cli/test_doctor_report.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from iserblk.doctor.known_secrets import find_secrets, of_environment, of_text, of_words
from iserblk.doctor.machine import Machine
from tests.doctor.box import Box

IQN = "iqn.2026-11.example:disk"


def found(machine: Machine, *words: str, directories: tuple[Path, ...] = ()) -> set[str]:
    known = find_secrets(machine, {}, [(words, "/")], directories)
    assert known.unread == {}
    return {each.reveal() for each in known.secrets}


def test_an_empty_machine(box: Box) -> None:
    known = find_secrets(box.machine, {}, ())
    assert (known.secrets, known.unread) == ([], {})


def test_urls() -> None:
    text = f"see iser://u%hush@h/{IQN} and iscsi://u:more@h/{IQN}?target-password=t"
    assert set(filter(None, of_text(text))) == {"hush", "more", "t"}
    words = ["info", f"iser://u%a b@h/{IQN}/0?target_password=c", "u%d@h", "x", "/a%b@c"]
    words += [f"--lun=iser://u%e@h/{IQN}/0:ro", f"iser:/u%f@h/{IQN}", f"u%g@h/{IQN}"]
    assert set(filter(None, of_words(words))) == {"a b", "c", "d", "e", "f", "g"}


def test_variables() -> None:
    environment = {
        "LIBISCSI_CHAP_PASSWORD": "a",
        "API_TOKEN": "b",
        "CREDENTIALS_DIRECTORY": "/run/credentials/x",
        "DISK": f"iser://u%c@h/{IQN}",
        "HOME": "/root",
    }
    assert set(filter(None, of_environment(environment))) == {"a", "b", "c"}


def test_a_secret_may_look_like_a_path() -> None:
    """One of 64 random ones in base64 begins with a slash."""
    environment = {
        "LIBISCSI_CHAP_PASSWORD": "/a+b==",
        "CHAP_PASSWORD_FILE": "/etc/iserblk/disk.chap",
        "TOKEN_PATH": "/run/token",
    }
    assert set(of_environment(environment)) == {"/a+b=="}


def test_lines_of_units(box: Box) -> None:
    box.put(
        "etc/systemd/system/iserblk-nbd@disk.service.d/own.conf",
        "[Service]\nEnvironment=LANG=C LIBISCSI_CHAP_PASSWORD=first X=y\n"
        "Environment='LIBISCSI_CHAP_TARGET_PASSWORD=sec ond'\n"
        'Environment="LIBISCSI_CHAP_PASSWORD=no end\n'
        "SetCredential=iserblk-chap:third\n",
    )
    assert {"first", "sec ond", "third"} <= found(box.machine)


def test_placeholders_of_examples_are_none(box: Box) -> None:
    box.put("etc/iscsi/iscsid.conf", "#node.session.auth.password = password\n")
    assert found(box.machine) == set()
    box.put("etc/iscsi/iscsid.conf", "#node.session.auth.password = once-in-use\n")
    assert found(box.machine) == {"once-in-use"}


def test_directories_of_a_user(box: Box) -> None:
    own = Path("/home/.config/iserblk")
    box.put("home/.config/iserblk/disk.chap", "a\nb\n")
    box.put("home/.config/iserblk/disk.conf", f"URL=iser://u%c@h/{IQN}\n")
    assert found(box.machine) == set()
    assert found(box.machine, directories=(own,)) == {"a", "b", "c"}


def test_systemds_credentials(box: Box) -> None:
    box.put("credentials/chap", "a\nb\n")
    environment = {"CREDENTIALS_DIRECTORY": "/credentials"}
    known = find_secrets(box.machine, environment, ())
    assert {each.reveal() for each in known.secrets} == {"a", "b"}


def test_what_is_no_file_keeps_nobody_waiting(box: Box) -> None:
    path = box.put("etc/iserblk/disk.conf")
    path.unlink()
    os.mkfifo(path)
    (box.root / "etc/iserblk/other.chap").mkdir()
    (box.root / "etc/iserblk/loop.chap").symlink_to("loop.chap")
    known = find_secrets(box.machine, {}, ())
    assert known.secrets == []
    assert list(known.unread) == [str(box.root / "etc/iserblk/loop.chap")]


def test_what_cannot_be_read_is_named(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    path = box.put("etc/iserblk/disk.chap", "hush\n")
    csi = box.root / "run/iserblk/csi"
    csi.mkdir(parents=True)
    opened = os.open

    def refuse(name: object, *rest: int) -> int:
        if name == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda name, mode: name != csi)
    known = find_secrets(box.machine, {}, ())
    assert known.unread == {str(csi): "Permission denied", str(path): "Permission denied"}


def test_settings_that_are_wrong(box: Box) -> None:
    box.put("etc/iserblk/t.toml", "secret = 'hush'\n[[[")
    box.put("etc/iserblk/u.toml", "x = [" * 5000)
    assert "hush" in found(box.machine)
