"""CHAP as users have it: a target with accounts, good and failed logins, and nothing of a secret
in a process list, a log, an error or JSON."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli import commands
from tests.cli.commands import Server, bad, environment, good, good_json, iserblk, serving
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need, run, running_nbdkit
from tests.support.target import IQN

MIB = 1 << 20
# Of this run alone: the tests look at the command lines of all processes of the machine.
_RUN = secrets.token_hex(4)
OWN, THEIRS, WRONG = f"hush-hush-{_RUN}", f"not-a-word-{_RUN}", f"loud-loud-{_RUN}"
SECRETS = (OWN, THEIRS, WRONG)
BY = [(), ("--nbdkit",)]  # the NBD server: ours, or nbdkit


class Setting(NamedTuple):
    """A running target, and files with secrets; ``host``: HOST:PORT/IQN."""

    server: Server
    host: str
    folder: Path

    def url(self, user_info: str = "", query: str = "") -> str:
        return f"iser://{user_info}{self.host}/0{query}"


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("chap")
    private(folder / "accounts", f"host:{OWN}\nother:secret-of-other\n")
    private(folder / "target", f"{THEIRS}\n")
    private(folder / "own", f"{OWN}\n")
    private(folder / "both", f"{OWN}\n{THEIRS}\n")
    private(folder / "wrong", f"{WRONG}\n")
    private(folder / "wrong-target", f"{OWN}\n{WRONG}\n")
    arguments = ["target", "--listen", "127.0.0.1:0", "--iqn", IQN]
    arguments += [
        "--lun",
        f"{folder / 'disk'}:size=1M",
        "--chap-accounts",
        str(folder / "accounts"),
    ]
    arguments += ["--chap-user", "disk", "--chap-secret-file", str(folder / "target")]
    with serving("-vv", *arguments, log=folder / "log") as server:
        yield Setting(server, server.url.removeprefix("iser://"), folder)
        assert server.end(signal.SIGTERM) == 143
    shows_nothing((folder / "log").read_text())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start commands instead of forking them: the test looks at their command lines."""
    monkeypatch.setattr(commands, "STARTED", True)


def shows_nothing(*texts: str) -> None:
    for text in texts:
        for secret in SECRETS:
            assert secret not in text


def command_lines() -> str:
    """The command lines of all processes, as ps shows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def test_from_files(setting: Setting) -> None:
    """Over software iWARP, each algorithm, one-way and mutual.

    proves: ISER-2.3-4, ISER-11-2, ISER-GEN-8.1.6.4-1
    """
    for name in ("own", "both"):
        at = setting.folder / name
        text = good("info", setting.url("host@"), "--chap-secret-file", at)
        shows_nothing(text)
    for auth in ("md5", "sha1", "sha256", "sha3-256"):
        url = setting.url("host@", f"?auth={auth}&chap-secret-file={setting.folder / 'both'}")
        (disk,) = good_json("info", url)["disks"]
        assert (disk["size"], disk["chap"], disk["chap_algorithm"]) == (MIB, "mutual", auth)


def test_info_says_how_it_logged_in(setting: Setting, url: str) -> None:
    for name, kind in (("own", "one-way"), ("both", "mutual")):
        at = f"?auth=sha256&chap-secret-file={setting.folder / name}"
        text = good("info", setting.url("host@", at))
        assert f"login CHAP, {kind}, SHA256" in " ".join(text.split())
    assert "login without CHAP" in " ".join(good("info", f"{url}/0").split())
    (disk,) = good_json("info", f"{url}/0")["disks"]
    assert (disk["chap"], disk["chap_algorithm"]) == ("none", None)
    assert "chap" not in disk["connection"]


def test_over_tcp(setting: Setting) -> None:
    """Traditional iSCSI, on the same port. proves: ISER-2.3-4"""
    url = setting.url("host@").replace("iser://", "iscsi://")
    assert good_json("info", url, "--chap-secret-file", setting.folder / "both")
    assert "authentication failed" in bad(24, "info", setting.url().replace("iser:", "iscsi:"))


def test_from_a_relative_path(setting: Setting) -> None:
    url = setting.url("host@")
    done = iserblk("info", url, "--chap-secret-file", "own", cwd=setting.folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_from_the_environment(setting: Setting) -> None:
    environment = {
        "LIBISCSI_CHAP_USERNAME": "host",
        "LIBISCSI_CHAP_PASSWORD": OWN,
        "LIBISCSI_CHAP_TARGET_USERNAME": "disk",
        "LIBISCSI_CHAP_TARGET_PASSWORD": THEIRS,
    }
    done = iserblk("-vv", "info", setting.url(), "--json", **environment)  # type: ignore[arg-type]
    assert done.returncode == 0
    shows_nothing(done.stdout, done.stderr)


def test_from_a_credential(setting: Setting) -> None:
    changes = {"CREDENTIALS_DIRECTORY": str(setting.folder)}
    done = iserblk("info", setting.url("host@"), "--chap-secret-credential", "both", **changes)  # type: ignore[arg-type]
    assert (done.returncode, done.stderr) == (0, "")


def test_from_the_url(setting: Setting) -> None:
    for query in ("", f"?target_user=disk&target_password={THEIRS}"):
        for arguments in (["-vv", "info"], ["info", "--json"], ["-vv", "doctor", "--json"]):
            done = iserblk(*arguments, setting.url(f"host%{OWN}@", query))
            assert done.returncode == 0, done
            shows_nothing(done.stdout, done.stderr)


def test_who_is_not_admitted(setting: Setting) -> None:
    folder = setting.folder
    for arguments in (
        [setting.url()],
        [setting.url(f"host%{WRONG}@")],
        [setting.url(f"nobody%{OWN}@")],
        [setting.url("host@"), "--chap-secret-file", folder / "wrong"],
        [setting.url(f"other%{OWN}@")],
    ):
        line = bad(24, "info", *arguments)
        assert "authentication failed" in line
        done = iserblk("-vv", "info", *arguments, "--json")
        assert done.returncode == 24
        shows_nothing(line, done.stdout, done.stderr)
    log = (folder / "log").read_text()
    assert "login refused: authentication failed: wrong user name or response" in log
    assert "login refused: authentication failed: the initiator skipped the security" in log
    shows_nothing(log)


def test_the_target_is_another_one(setting: Setting) -> None:
    at = setting.folder / "wrong-target"
    line = bad(24, "info", setting.url("host@"), "--chap-secret-file", at)
    assert "did not prove who it is" in line
    line = bad(24, "info", setting.url(f"host%{OWN}@", f"?target_user=x&target_password={THEIRS}"))
    assert "did not prove who it is" in line
    shows_nothing(line)


def test_a_target_that_authenticates_nobody(tmp_path: Path) -> None:
    """The initiator has a secret: it refuses a login without CHAP."""
    arguments = ["target", "--listen", "127.0.0.1:0", "--iqn", IQN]
    with serving(*arguments, "--lun", f"{tmp_path / 'a'}:size=1M", log=tmp_path / "log") as server:
        plain = f"{server.url}/0"
        good("info", plain)
        line = bad(24, "info", plain.replace("iser://", f"iser://host%{OWN}@"))
        shows_nothing(line, (tmp_path / "log").read_text())


def test_a_target_that_cannot_prove_who_it_is(tmp_path: Path) -> None:
    """It has accounts and no secret of its own, and mutual CHAP is asked for."""
    accounts = private(tmp_path / "accounts", f"host:{OWN}\n")
    both = private(tmp_path / "both", f"{OWN}\n{THEIRS}\n")
    arguments = ["target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--chap-accounts", accounts]
    with serving(*arguments, "--lun", f"{tmp_path / 'a'}:size=1M", log=tmp_path / "log") as server:
        url = f"{server.url}/0".replace("iser://", "iser://host@")
        line = bad(24, "info", url, "--chap-secret-file", both)
    portal = server.url.split("/")[2]
    assert line.startswith(f"iserblk: {portal}: login refused: authentication failed")
    assert "for mutual CHAP the target needs a secret of its own" in line
    shows_nothing(line)


@pytest.mark.usefixtures("started")
def test_a_gateway(setting: Setting, tmp_path: Path) -> None:
    """Its command line has the secret no longer than any other, with `:ro` and `--lun=`, too."""
    lun = f"--lun={setting.url(f'host%{OWN}@')}:ro"
    arguments = ["target", "--listen", "127.0.0.1:0", "--iqn", f"{IQN}.gate", lun]
    with serving(*arguments, log=tmp_path / "log") as gate:
        seen = command_lines()
        assert f"--lun=iser://host@{setting.host}" in seen
        shows_nothing(seen)
        (disk,) = good_json("info", gate.url)["disks"]
        assert disk["read_only"] and disk["gateway_to"] == [IQN]
    shows_nothing((tmp_path / "log").read_text())


def test_wrong_files(setting: Setting, tmp_path: Path) -> None:
    open_file = private(tmp_path / "open", OWN)
    open_file.chmod(0o644)
    url = setting.url("host@")
    assert "others can read it" in bad(7, "info", url, "--chap-secret-file", open_file)
    assert "No such file" in bad(7, "info", url, "--chap-secret-file", tmp_path / "none")
    assert "no user" in bad(7, "info", setting.url(), "--chap-secret-file", setting.folder / "own")
    lun = f"{tmp_path / 'lun'}:size=1M"
    start = ["target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--lun", lun, "--chap-accounts"]
    assert "others can read it" in bad(7, *start, open_file)
    broken = private(tmp_path / "broken", f"{OWN}\n")
    shows_nothing(bad(7, *start, broken))
    accounts = setting.folder / "accounts"
    mutual = ["--chap-user", "disk", "--chap-secret-file", setting.folder / "own"]
    assert "each needs its own" in bad(7, *start, accounts, *mutual)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("server", BY)
@pytest.mark.parametrize("way", ["file", "credential", "environment", "url"])
def test_nbd(setting: Setting, tmp_path: Path, way: str, server: tuple[str, ...]) -> None:
    """(nbdkit logs in by itself, twice.) No command line or log shows the secret."""
    need("nbdinfo", *(["nbdkit"] if server else []))
    words: list[object] = []
    changes: dict[str, str] = {}
    user = "host@"
    if way == "file":
        words = ["--chap-secret-file", setting.folder / "both"]
    elif way == "credential":
        words = ["--chap-secret-credential", "both"]
        changes = {"CREDENTIALS_DIRECTORY": str(setting.folder)}
    elif way == "url":
        user = f"host%{OWN}@"
    else:
        user = ""
        changes = {"LIBISCSI_CHAP_USERNAME": "host", "LIBISCSI_CHAP_PASSWORD": OWN}
    path, log = tmp_path / "socket", tmp_path / "log"
    arguments = ["-vv", "nbd", setting.url(user), "--socket", path, *server, *words]
    with serving(*arguments, log=log, **changes) as running:
        assert run("nbdinfo", "--size", running.url).strip() == str(MIB)
        seen = command_lines()
        assert "iser://" in seen
        shows_nothing(seen)
        assert running.end(signal.SIGTERM) == 143
    shows_nothing(log.read_text())


@pytest.mark.parametrize("server", BY)
def test_nbd_is_refused(setting: Setting, tmp_path: Path, server: tuple[str, ...]) -> None:
    need(*(["nbdkit"] if server else []))
    url, at = setting.url("host@"), setting.folder / "wrong"
    words = ("--socket", tmp_path / "s", "--chap-secret-file", at, *server)
    shows_nothing(bad(24, "nbd", url, *words))


def test_the_plugin_alone(setting: Setting, tmp_path: Path) -> None:
    need("nbdkit", "nbdinfo")
    at = setting.folder / "both"
    parameters = (f"chap-secret-file={at}",)
    with running_nbdkit([setting.url("host@")], tmp_path, parameters=parameters) as uri:
        assert run("nbdinfo", "--size", uri).strip() == str(MIB)
    shows_nothing((tmp_path / "nbdkit.log").read_text())


@pytest.mark.usefixtures("started")
def test_mount(setting: Setting, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    at = setting.folder / "both"
    good("mount", setting.url("host@"), place, "-o", f"chap-secret-file={at}")
    try:
        assert os.stat(place / "lun0").st_size == MIB
        shows_nothing(command_lines(), Path("/proc/mounts").read_text())
    finally:
        good("umount", place)
    good("mount", setting.url(f"host%{OWN}@", f"?target_password={THEIRS}"), place)
    try:
        shows_nothing(command_lines(), Path("/proc/mounts").read_text())
    finally:
        good("umount", place)
    words = ["-o", f"chap-secret-file={setting.folder / 'wrong'}"]
    done = iserblk("mount", setting.url("host@"), place, *words)
    assert done.returncode == 32
    assert "authentication failed" in done.stderr
    shows_nothing(done.stdout, done.stderr)


def test_mount_by_its_module(setting: Setting, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "fuse_mount", setting.url(f"host%{OWN}@"), str(place)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready {place}\n"
        shows_nothing(command_lines())
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
