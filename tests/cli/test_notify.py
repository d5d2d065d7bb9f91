"""sd_notify(3) and the ready line."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from iserblk.cli import notify


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(
    abstract: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"@iserblk-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1) if abstract else name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify.ready("iser://host/iqn")
        assert manager.recv(100) == b"READY=1"
    assert capsys.readouterr().out == "ready iser://host/iqn\n"


def test_without_systemd(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify.ready("x")
    assert capsys.readouterr().out == "ready x\n"


def test_a_manager_that_is_gone_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify.tell_systemd("READY=1")
    assert "NOTIFY_SOCKET" in caplog.text
