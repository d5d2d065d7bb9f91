"""``iserblk target --access``: LUNs for some initiators only, and names that belong to users."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from iserblk import open_disks
from tests.cli.commands import bad, good_json, iserblk, serving
from tests.support import logs
from tests.support.cores import session_of
from tests.support.target import IQN
from tests.support.until import until_blocking

A, B, C = (f"iqn.2026-11.example:{letter}" for letter in "abc")
SECRETS = {"alice": "alices-secret-01", "bob": "bobs-secret-0002"}


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
def test_luns_by_initiator(tmp_path: Path, scheme: str) -> None:
    access, accounts, log = tmp_path / "access", tmp_path / "accounts", tmp_path / "log"
    access.write_text(f"{A} 0 alice\n* 1\n")
    accounts.touch(mode=0o600)
    accounts.write_text("".join(f"{user}:{secret}\n" for user, secret in SECRETS.items()))
    arguments = ["-v", "target", "--listen", "127.0.0.1:0", "--iqn", IQN]
    for number in range(2):
        arguments += ["--lun", f"{tmp_path}/lun{number}:size=1M"]
    arguments += ["--access", str(access), "--chap-accounts", str(accounts)]
    with serving(*arguments, log=log) as server:
        place = server.url.replace("iser://", f"{scheme}://")

        def seen(name: str, user: str) -> list[int]:
            url = place.replace("://", f"://{user}%{SECRETS[user]}@")
            return [
                disk["lun"] for disk in good_json("info", url, "--initiator-name", name)["disks"]
            ]

        assert seen(A, "alice") == [0]
        assert seen(B, "bob") == seen(C, "alice") == [1]
        url = place.replace("://", f"://bob%{SECRETS['bob']}@")
        done = iserblk("info", url, "--initiator-name", A)
        assert done.returncode == 5 and "not authorized" in done.stderr
        until_blocking(lambda: f"{A} may not log in as 'bob'" in log.read_text())
        before = log.read_text().count("read again")
        access.write_text(f"{A} all\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until_blocking(lambda: log.read_text().count("read again") > before)
        assert seen(A, "bob") == [0, 1]
        access.write_text(f"{A} 0 eve\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until_blocking(lambda: "the configuration is left as it is" in log.read_text())
        assert seen(A, "bob") == [0, 1]


@pytest.mark.logs(logs.RECONNECTED)
def test_a_session_of_another_user_ends(tmp_path: Path) -> None:
    """Its name may be another host's. It does not get the LUN that comes for that name."""
    access, accounts, luns = tmp_path / "access", tmp_path / "accounts", tmp_path / "luns"
    access.write_text(f"{A} 0\n{B} 0 bob\n")
    accounts.touch(mode=0o600)
    accounts.write_text("".join(f"{user}:{secret}\n" for user, secret in SECRETS.items()))
    luns.write_text(f"0 {tmp_path}/lun0:size=1M\n")
    log = tmp_path / "log"
    arguments = ["-v", "target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--luns", str(luns)]
    arguments += ["--access", str(access), "--chap-accounts", str(accounts)]
    with serving(*arguments, log=log) as server, ExitStack() as stack:
        url = server.url.replace("://", f"://bob%{SECRETS['bob']}@") + "/0"
        a, b = (
            stack.enter_context(open_disks([url], {"initiator-name": name})).disks["lun0"]
            for name in (A, B)
        )
        for disk in (a, b):
            disk.read_into(memoryview(bytearray(512)), 0)
        access.write_text(f"{A} all alice\n{B} 0 bob\n")
        luns.write_text(f"{luns.read_text()}1 {tmp_path}/lun1:size=1M\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until_blocking(lambda: "the configuration was read again" in log.read_text())
        until_blocking(lambda: f"{A} may not log in as 'bob'" in log.read_text())  # it tried again
        assert session_of(a).suspended
        b.read_into(memoryview(bytearray(512)), 0)
        assert session_of(b).counts.reconnects == 0
        assert f"{A}: session ended: it may not be logged in as 'bob'" in log.read_text()


def test_users_need_accounts(tmp_path: Path) -> None:
    access = tmp_path / "access"
    access.write_text(f"{A} 0 alice\n")
    arguments = [
        "target",
        "--listen",
        "127.0.0.1:0",
        "--iqn",
        IQN,
        "--lun",
        f"{tmp_path}/l:size=1M",
    ]
    assert "no account of the user 'alice'" in bad(7, *arguments, "--access", str(access))
