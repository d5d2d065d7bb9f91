"""``iserblk target --access``: LUNs for some initiators only, and names that belong to users."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.commands import bad, good_json, iserblk, serving
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
        assert f"{A} may not log in as 'bob'" in log.read_text()
        before = log.read_text().count("read again")
        access.write_text(f"{A} all\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until_blocking(lambda: log.read_text().count("read again") > before)
        assert seen(A, "bob") == [0, 1]
        access.write_text(f"{A} 0 eve\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until_blocking(lambda: "the configuration is left as it is" in log.read_text())
        assert seen(A, "bob") == [0, 1]


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
