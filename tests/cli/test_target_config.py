"""``iserblk target --config``: a target by a file, which is read again under sessions."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import iserblk as package
from iserblk.cli import target as target_cli
from iserblk.cli.main import cli
from iserblk.errors import IserblkError
from iserblk.target.config import TargetConfig
from tests.cli.commands import COMMAND, Server, bad, environment, good_json, iserblk, serving
from tests.support.cores import session_of
from tests.support.target import IQN, ROOT, running_target
from tests.support.until import until_blocking

MIB = 1 << 20
A, B, C = (f"iqn.2026-11.example:{letter}" for letter in "abc")
OLD, NEW, OWN = "alices-secret-01", "alices-secret-02", "the-targets-own-1"
FIRST = f"""
iqn = "{IQN}"
[[portal]]
listen = "127.0.0.1:0"
[lun.0]
file = "zero"
size = "1M"
[lun.1]
file = "one"
size = "2M"
[account.alice]
secret = "{OLD}"
[chap]
user = "disk"
secret = "{OWN}"
[initiator."{A}"]
luns = "all"
user = "alice"
[initiator."{B}"]
luns = [1]
"""


class Target:
    """A target of a file, and the file. ``url``: its own, without a LUN."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self.path = path
        self.url = server.url

    @property
    def log(self) -> str:
        return self.server.log.read_text()

    def change(self, text: str, words: str = "the configuration was read again") -> None:
        """Replace the file; wait until the log says ``words`` once more."""
        before = self.log.count(words)
        self.path.write_text(text)
        os.kill(self.server.process.pid, signal.SIGHUP)
        until_blocking(lambda: self.log.count(words) > before)

    def of(self, scheme: str, secret: str = OLD) -> str:
        return self.url.replace("iser://", f"{scheme}://alice%{secret}@")

    def seen(self, name: str, secret: str = OLD, scheme: str = "iser") -> list[tuple[int, int]]:
        """Number and size of each LUN that there is for an initiator."""
        found = good_json("info", self.of(scheme, secret), "--initiator-name", name)
        return [(disk["lun"], disk["size"]) for disk in found["disks"]]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    path = tmp_path / "target.toml"
    path.touch(mode=0o600)
    path.write_text(FIRST)
    with serving("-v", "target", "--config", path, log=tmp_path / "log") as server:
        yield Target(server, path)


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
def test_what_the_file_says(target: Target, scheme: str) -> None:
    """LUNs, who may log in, and who sees what. The log has no secret."""
    assert target.seen(A, scheme=scheme) == [(0, MIB), (1, 2 * MIB)]
    assert target.seen(B, scheme=scheme) == [(1, 2 * MIB)]
    mutual = target.of(scheme) + f"?target_user=disk&target_password={OWN}"
    assert len(good_json("info", mutual, "--initiator-name", A)["disks"]) == 2
    bad(24, "info", target.of(scheme, "wrong-secret-0001"))
    bad(24, "info", target.url.replace("iser:", f"{scheme}:"))
    assert iserblk("info", target.of(scheme), "--initiator-name", C).returncode == 21
    assert target.server.end(signal.SIGTERM) == 143
    assert not any(secret in target.log for secret in (OLD, OWN))


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
def test_changes_under_a_session(
    target: Target, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A session of ours looks if its LUN is the same when it is told of other LUNs, and goes on; so
    it does when its account has another secret, which counts for new logins."""
    caplog.set_level(logging.INFO, "iserblk.disk")
    one = FIRST.partition("[lun.1]")[0]
    rest = "[account.alice]" + FIRST.partition("[account.alice]")[2]
    options = {"initiator-name": A}
    with package.open_disks([f"{target.of(scheme)}/0"], options) as disks:
        disk = disks.disks["lun0"]
        disk.write(memoryview(b"a" * 512), 0)
        changed = f'{one}[lun.7]\nfile = "seven"\nsize = "1M"\n{rest}'
        target.change(changed)
        assert "LUNs gone: [1]; new: [7]" in target.log
        assert target.seen(A, scheme=scheme) == [(0, MIB), (7, MIB)]
        disk.write(memoryview(b"b" * 512), 512)
        session = session_of(disk)
        assert session.counts.reconnects == 0
        assert caplog.text.count("it is the same LUN") == 1
        target.change(changed.replace(OLD, NEW))
        assert target.seen(A, NEW, scheme) == [(0, MIB), (7, MIB)]
        bad(24, "info", target.of(scheme, OLD), "--initiator-name", A)
        buffer = bytearray(1024)
        disk.read_into(memoryview(buffer), 0)
        assert bytes(buffer) == b"a" * 512 + b"b" * 512
        disk.flush()
        assert session.counts.reconnects == 0
        assert caplog.text.count("it is the same LUN") == 1
    assert not any(secret in target.log for secret in (OLD, NEW, OWN))


def test_a_faulty_file_changes_nothing(target: Target) -> None:
    """One line, with the line or the key. The file is right but for that in each case, and has
    another LUN."""
    more = f'{FIRST}[lun.7]\nfile = "seven"\nsize = "1M"\n'
    for text, words in (
        (more + "x\n", f"(at line {len(more.splitlines()) + 1}, column 2)"),
        (more.replace("luns = [1]", 'luns = ["1-"]'), f'initiator."{B}".luns: '),
        (more.replace('user = "alice"', 'user = "eve"'), f'initiator."{A}".user: '),
        (more.replace('size = "2M"', 'size = "2X"'), "lun.1: `size=2X`"),
        (more.replace("127.0.0.1:0", "127.0.0.1:1"), "restart the target to change its portals"),
        (more.replace(f'secret = "{OLD}"', f'secret = "{OWN}"'), "the same secret as the target"),
    ):
        before = len(target.log.splitlines())
        target.change(text, "the configuration is left as it is")
        (line,) = [each for each in target.log.splitlines()[before:] if "session" not in each]
        assert line.startswith(f"iserblk: the configuration is left as it is: {target.path}: ") or (
            "restart the target" in line
        )
        assert words in line
    target.path.chmod(0o640)
    target.change(more, "the configuration is left as it is")
    assert "others can read" in target.log.splitlines()[-1]
    target.path.unlink()
    os.kill(target.server.process.pid, signal.SIGHUP)
    until_blocking(lambda: "No such file" in target.log)
    assert target.seen(A) == [(0, MIB), (1, 2 * MIB)]
    assert not any(secret in target.log for secret in (OLD, OWN))


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
def test_a_lun_goes_while_it_is_written_to(target: Target, scheme: str, tmp_path: Path) -> None:
    """Each write ends. What was acknowledged is in the file, flushed or not."""
    acknowledged = 0
    some = threading.Event()
    failures: list[IserblkError] = []
    options = {"initiator-name": A, "io-timeout": "5"}
    blocks = 2 * MIB // 512

    def write(disk: Any) -> None:
        nonlocal acknowledged
        try:
            while True:
                turn, block = divmod(acknowledged, blocks)
                disk.write(memoryview(bytes([turn % 251 + 1]) * 512), block * 512)
                acknowledged += 1
                if acknowledged > 100:
                    some.set()
        except IserblkError as error:
            failures.append(error)
            some.set()

    with package.open_disks([f"{target.of(scheme)}/1"], options) as disks:
        writer = threading.Thread(target=write, args=[disks.disks["lun1"]], daemon=True)
        writer.start()
        some.wait()
        assert not failures
        target.change(FIRST.replace("[lun.1]", "[lun.2]").replace("one", "two"))
        writer.join()
        assert len(failures) == 1
    content = (tmp_path / "one").read_bytes()
    for number in range(max(0, acknowledged - blocks + 1), acknowledged):
        turn, block = divmod(number, blocks)
        assert content[block * 512 : block * 512 + 512] == bytes([turn % 251 + 1]) * 512


def test_a_hangup_does_no_harm_whenever_it_comes(tmp_path: Path) -> None:
    """Before the target is ready, which reads its file again then; and while it ends."""
    path, log = tmp_path / "target.toml", tmp_path / "log"
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running_target([f"{tmp_path}/far:size=1M"], tmp_path / "far.log") as far,
    ):
        portals = [f"127.0.0.1:{silent.getsockname()[1]}", far.listen]
        urls = ", ".join(f'"iscsi://{portal}/{IQN}/0"' for portal in portals)
        text = f'iqn = "{A}"\n[[portal]]\nlisten = "127.0.0.1:0"\n[lun.0]\nurl = [{urls}]\n'
        path.write_text(text)
        with (
            log.open("wb") as stderr,
            subprocess.Popen(
                [*COMMAND, "-v", "target", "--config", path],
                stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(),
            ) as process,
        ):  # fmt: skip
            try:
                held, _ = silent.accept()  # it has read the file, and waits for an answer
                path.write_text(f'{text}[lun.1]\nfile = "one"\nsize = "2M"\n')
                process.send_signal(signal.SIGHUP)
                silent.close()
                held.close()
                assert process.stdout is not None
                word, _, url = process.stdout.readline().strip().partition(" ")
                assert word == "ready", log.read_text()
                until_blocking(lambda: "the configuration was read again" in log.read_text())
                assert [each["size"] for each in good_json("info", url)["disks"]] == [MIB, 2 * MIB]
                process.terminate()

                def ended() -> bool:
                    process.send_signal(signal.SIGHUP)
                    return process.poll() is not None

                until_blocking(ended)
                assert process.returncode == 128 + signal.SIGTERM
            finally:
                process.kill()


def test_libiscsis_programs(target: Target) -> None:
    """iscsi-ls and iscsi-inq see what the initiator may see, and after the change what it may see
    then."""
    for name in ("iscsi-ls", "iscsi-inq"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed: run scripts/setup --tests")
    portal = target.url.split("/")[2]

    def run(status: int, *words: str, secret: str = OLD, name: str = B) -> str:
        own = {
            "LIBISCSI_CHAP_USERNAME": "alice",
            "LIBISCSI_CHAP_PASSWORD": secret,
            "LIBISCSI_CHAP_TARGET_USERNAME": "disk",
            "LIBISCSI_CHAP_TARGET_PASSWORD": OWN,
        }
        done = subprocess.run(
            [words[0], "-i", name, *words[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, **own},
        )
        assert bool(done.returncode) == bool(status), done
        return done.stdout + done.stderr

    def listed(**given: str) -> list[str]:
        said = run(0, "iscsi-ls", "-s", f"iscsi://{portal}", **given)
        return re.findall(r"Lun:(\d+)", said)

    assert listed() == ["1"] and listed(name=A) == ["0", "1"]
    assert "DIRECT_ACCESS" in run(0, "iscsi-inq", f"iscsi://{portal}/{IQN}/1")
    target.change(f'{FIRST}[lun.7]\nfile = "seven"\nsize = "1M"\n'.replace("[1]", "[7]"))
    assert listed() == ["7"] and listed(name=A) == ["0", "1", "7"]
    target.change(FIRST.replace(OLD, NEW))
    run(1, "iscsi-inq", f"iscsi://{portal}/{IQN}/1")
    assert "DIRECT_ACCESS" in run(0, "iscsi-inq", f"iscsi://{portal}/{IQN}/1", secret=NEW)


def test_refusals(tmp_path: Path) -> None:
    """One line each, before anything is served."""
    path = tmp_path / "target.toml"
    assert "No such file" in bad(7, "target", "--config", path)
    path.write_text("iqn = 'disk'\n")
    assert f"{path}: iqn: 'disk' is no iSCSI name" in bad(7, "target", "--config", path)
    path.write_text(f'iqn = "{IQN}"\n[lun.0]\nfile = "no"\n')
    assert f"{tmp_path}/no: no such file" in bad(7, "target", "--config", path)
    for option in (["--lun", "x"], ["--iqn", IQN], ["--slp"], ["--listen", "127.0.0.1:0"]):
        line = bad(7, "target", *option, "--config", path)
        assert f"{option[0]}: write it into the file of --config" in line
    assert "--iqn IQN, or --config FILE" in bad(7, "target", "--lun", "x:size=1M")
    path.write_text(FIRST)
    assert "account.alice.secret: others can read" in bad(7, "target", "--config", path)


def test_options_and_file_are_one_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same target, once by options and once by a file: both make the same configuration, which
    is all that is served."""
    seen: list[TargetConfig] = []
    monkeypatch.setattr(target_cli, "serve_config", lambda read, *_: seen.append(read()))
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)

    far = "iser://10.0.0.{}/iqn.2026-11.example:far/0"
    by_options = [
        *("--iqn", IQN, "--max-connections", "4"),
        *("--listen", "127.0.0.1:3260", "--listen", "127.0.0.1:3261,2,transport=tcp"),
        *("--lun", f"{tmp_path}/system.img:size=20G"),
        *("--lun", "/srv/archive.img:ro:block=4096:serial=ARCHIVE-1"),
        *("--luns", write("luns", f"7 {far.format(1)} {far.format(2)}\n")),
        *("--chap-accounts", write("accounts", "alice:alices-secret-01\nbob:bobs-secret-0002\n")),
        *("--chap-user", "disk", "--chap-secret-file", write("own", "the-targets-own-1\n")),
        *("--access", write("access", "iqn.2026-11.example:host-a 0,1-7 alice\n* 1\n")),
        *("--access-states", write("states", "2 non-optimized\n")),
        *("--metrics", "127.0.0.1:13261"),
    ]
    example = write("target.toml", (ROOT / "docs/target.toml").read_text())
    for words in (by_options, ["--config", example]):
        # As below `iserblk`: click keeps the help option that it makes first.
        names = cli.context_settings["help_option_names"]
        result = CliRunner().invoke(
            target_cli.command, words, catch_exceptions=False, help_option_names=names
        )
        assert result.exit_code == 0
    one, other = seen
    assert one == other
