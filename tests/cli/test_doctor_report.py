"""The report of ``iserblk doctor``: what is in it, and that no secret is.

Every kind of secret that iserblk knows is planted in its own place, and then wherever a user or a
program may have put it: on command lines, in variables, in logs, in findings.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import click
import pytest

from iserblk.cli.command import names_of
from iserblk.cli.doctor import show
from iserblk.cli.doctor_report import Surroundings, portal_json, report_json
from iserblk.cli.main import COMMANDS, cli
from iserblk.doctor.finding import ERROR, Finding
from iserblk.doctor.known_secrets import OPTIONS
from iserblk.doctor.machine import Machine
from iserblk.doctor.page import page
from iserblk.doctor.portal import PortalReport
from iserblk.doctor.processes import processes
from iserblk.doctor.report import what_works
from iserblk.errors import TransportError
from iserblk.options import OPTION_NAMES
from iserblk.secret import Secret
from tests.cli.commands import environment, iserblk, serving
from tests.doctor.box import Box, install
from tests.support.target import IQN
from tests.support.until import until_blocking

URL = "iser://10.0.0.1/iqn.2026-11.example:disk/0"
KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"  # begins a key, and the secret goes on


class Planted:
    """A machine with a secret of every kind in its own place. ``secrets``: kind → text."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.secrets: dict[str, str] = {}
        self.words: list[list[str]] = []  # command lines
        self._fill()

    def _new(self, kind: str) -> str:
        """Of letters that URLs, JSON, HTML and shells write in their own way, too."""
        self.secrets[kind] = f'{kind.replace(" ", ".")}-<&%4"ü'
        return self.secrets[kind]

    def _plain(self, kind: str) -> str:
        """Of letters that stand for themselves: where a URL or a file allows no others."""
        self.secrets[kind] = f"hush.{kind.replace(' ', '.')}.2026"
        return self.secrets[kind]

    def _url(self, kind: str, colon: str = "%", key: str = "") -> str:
        info = f"alice{colon}{self._plain(kind)}"
        query = f"?target_password={self._plain(key)}&io-timeout=9" if key else ""
        return URL.replace("://", f"://{info}@") + query

    def _private(self, path: str, text: str) -> str:
        self.box.put(path, text).chmod(0o600)
        return f"/{path}"

    def _fill(self) -> None:
        new, plain, url, private = self._new, self._plain, self._url, self._private
        private("etc/iserblk/named.conf", f"URL={url('URL of a named LUN', key='key of a URL')}\n")
        private("etc/iserblk/quoted.conf", f'URL="{url("URL in quotes", ":")}"\nDEVICE=/dev/nbd1\n')
        chap = f"{new('file of a named LUN')}\n{new('second line, the target')}\n"
        private("etc/iserblk/named.chap", chap)
        options = f"OPTIONS=chap-secret-file={self.box.root}/etc/elsewhere.chap,io-timeout=9\n"
        private("etc/iserblk/elsewhere.conf", f"URL={URL.replace('://', '://alice@')}\n{options}")
        private("etc/elsewhere.chap", f"{new('file of an option')}\n")
        private("etc/credstore/iserblk-named.chap", f"{new('credential store')}\n")
        private("run/credentials/iserblk-attach@named.service/chap", f"{new('credential')}\n")
        private(
            "etc/iserblk/target.toml",
            f"iqn = 'iqn.2026-11.example:t'\n[account.alice]\nsecret = '{new('target, account')}'\n"
            f"[account.bob]\nsecret-file = 'bob'\n[chap]\nuser = 't'\n"
            f'secret = "{plain("target, own")}"\n[lun.7]\nurl = ["{url("gateway in a file")}"]\n',
        )
        private("etc/iserblk/bob", f"{new('target, file of an account')}\n")
        private("etc/broken.toml", f"secret = '{plain('target, file with an error')}'\n[[[\n")
        private("etc/accounts", f"# users\nalice:{new('accounts of --chap-accounts')}\n")
        private("etc/own", f"{new('--chap-secret-file of a target')}\n")
        private("etc/luns", f"3 {url('list of --luns')}\n")
        private("etc/psk", f"alice:{'5ec7e7' * 8}\n")
        self.secrets["--tls-psk"] = "5ec7e7" * 8
        self.secrets["--tls-certificates"] = f"{KEY}hush"
        pem = f"-----BEGIN PRIVATE KEY-----\n{KEY}hush\n-----END PRIVATE KEY-----\n"
        private("etc/pki/server-key.pem", pem)
        private("run/iserblk/csi/volume.secret", f"{new('CSI, node')}\n{new('CSI, target')}\n")
        self.secrets["service account"] = "eyJhbGciOiJSUzI1.eyJpc3MiOiJr.c2lnbmF0dXJl"
        token = "var/run/secrets/kubernetes.io/serviceaccount/token"
        private(token, self.secrets["service account"])
        for top, name in (("etc", "node record"), ("var/lib", "node record elsewhere")):
            private(
                f"{top}/iscsi/nodes/iqn.2026-11.example:x/10.0.0.1,3260,1/default",
                f"node.name = iqn.2026-11.example:x\nnode.session.auth.username = alice\n"
                f"node.session.auth.password = {new(name)}\n"
                f"node.session.auth.password_in = {new(f'{name}, target')}\n",
            )
        private(
            "etc/iscsi/send_targets/10.0.0.1,3260/st_config",
            f"discovery.sendtargets.auth.password = {new('discovery account')}\n"
            f"discovery.sendtargets.auth.password_in = {new('discovery account, target')}\n",
        )
        private("etc/iscsi/iscsid.conf", f"node.session.auth.password = {new('iscsid')}\n"
                "# discovery.sendtargets.auth.password = password\n")  # fmt: skip
        self.box.put("etc/fstab", f"{url('fstab')} /mnt iserblk _netdev 0 0\n")
        drop_in = f"[Service]\nEnvironment=LIBISCSI_CHAP_PASSWORD={plain('drop-in of a unit')}\n"
        private("etc/systemd/system/iserblk-attach@named.service.d/chap.conf", drop_in)
        self._run(["iserblk", "info", url("command line")], {})
        self._run(["/usr/bin/python3", "-m", "iserblk.cli", "info", url("colon", ":", "key")], {})
        self._run(["sudo", "iserblk", "target", f"--lun={url('gateway')}:ro", "--iqn", IQN], {})
        self._run(
            ["nbdkit", "python", "/x/nbd_plugin/iserblk.py", f"uri={url('nbdkit')}",
             f"target_password={plain('parameter of nbdkit')}"], {},
        )  # fmt: skip
        self._run(["iserblk", "doctor", f"alice%{plain('no scheme')}@host/{IQN}"], {})
        self._run(["iserblk", "doctor", f"alice%{plain('no target')}@host"], {})
        self._run(["iserblk", "info", f"iser://alice%{plain('sla/sh')}@host/{IQN}/0"], {})
        self._run(
            ["iserblk", "target", "--chap-accounts", "etc/accounts", "--chap-secret-file=etc/own",
             "--luns", "etc/luns", "--config", "etc/broken.toml"], {},
        )  # fmt: skip
        self._run(["iserblk", "nbd", "--tls-psk", "etc/psk", "--tls-certificates=etc/pki"], {})
        self._run(
            ["iserblk", "nbd", URL],
            {
                "LIBISCSI_CHAP_USERNAME": "alice",
                "LIBISCSI_CHAP_PASSWORD": new("environment"),
                "LIBISCSI_CHAP_TARGET_PASSWORD": new("environment, target"),
                "KUBE_TOKEN": new("another variable"),
            },
        )

    def _run(self, words: list[str], variables: dict[str, str]) -> None:
        pid = 1_000_000_000 + len(self.words)
        self.words.append(words)
        self.box.put(f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in words))
        pairs = "".join(f"{name}={value}\0" for name, value in variables.items())
        self.box.put(f"proc/{pid}/environ", pairs)
        (self.box.root / f"proc/{pid}/cwd").symlink_to("/")

    def forms(self) -> Iterator[list[str]]:
        """Each secret as it is, and as programs write it."""
        for text in self.secrets.values():
            octets = text.encode()
            bare = base64.b64encode(octets).decode().rstrip("=")
            yield [text, quote(text, safe=""), json.dumps(text)[1:-1], octets.hex(), bare,
                   repr(text)[1:-1]]  # fmt: skip

    def log(self) -> None:
        """Write a log in which other programs have put all of them."""
        rows = [
            {
                "__REALTIME_TIMESTAMP": str(1_795_000_000_000_000 + at),
                "SYSLOG_IDENTIFIER": "iserblk-nbd0",
                "MESSAGE": f"line {at}: {' | '.join(forms)} | said a program of a user",
            }
            for at, forms in enumerate(self.forms())
        ]
        file = self.box.put("journal", "".join(f"{json.dumps(row)}\n" for row in rows))
        self.box.program("opt/bin/journalctl")
        where = shlex.quote(str(file))
        script = f'#!/bin/sh\ncase "$*" in *--unit*|*--dmesg*) ;; *) cat {where} ;; esac\n'
        self.box.put("opt/bin/journalctl", script).chmod(0o755)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    box = Box(tmp_path)
    install(box)
    planted = Planted(box)
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(box.root / "etc/iserblk"))
    monkeypatch.setenv("LIBISCSI_CHAP_PASSWORD", "this-environment-2026")
    planted.secrets["this environment"] = "this-environment-2026"
    planted.secrets["given on the command line"] = "given-on-the-command-line"
    planted.log()
    return planted


def without(texts: dict[str, str], planted: Planted) -> None:
    """Assert that no text has a secret in it."""
    found = [
        f"{form!r} in {where}"
        for forms in planted.forms()
        for form in forms
        for where, text in texts.items()
        if form in text
    ]
    assert not found


def test_no_secret_is_in_any_form_of_the_report(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = planted.box.machine
    every = " ".join(planted.secrets.values())
    findings = [Finding("all", ERROR, f"in a text: {every}", f"in a remedy: {every}")]
    works = what_works(findings)
    portals = [PortalReport("10.0.0.1:3260", URL, findings, None, TransportError("broken"))]
    around = Surroundings(machine, [Secret("given-on-the-command-line")])
    report = report_json(findings, works, portals, 4, around)
    texts = {"JSON": json.dumps(report, ensure_ascii=False), "escaped JSON": json.dumps(report)}
    texts["HTML"] = page(report, dict.fromkeys(works, "words"))
    show(findings, works, portals, around.hider)
    texts["text"] = capsys.readouterr().out
    without(texts, planted)
    # What was to be hidden is there, and what is no secret has stayed.
    hidden = [f"line {at}: {' | '.join(['***'] * 6)} | said a program of a user"
              for at in range(len(planted.secrets))]  # fmt: skip
    assert isinstance(report["log"], list)
    assert [line["text"] for line in report["log"]] == hidden
    assert isinstance(report["processes"], list)
    assert [each["command_line"][0] for each in report["processes"]] == [
        words[0] for words in planted.words
    ]
    assert "iser://…@10.0.0.1/iqn.2026-11.example:disk/0" in texts["JSON"]
    assert isinstance(report["named"], list)
    assert [each["name"] for each in report["named"]] == ["elsewhere", "named", "quoted"]


def test_patterns_alone_hide_what_is_on_command_lines(tmp_path: Path) -> None:
    """Nothing is known of the secrets: another user's files have them."""
    planted = Planted(Box(tmp_path))
    for path in ("etc/psk", "etc/accounts", "etc/own"):
        (planted.box.root / path).unlink()
    hider = Surroundings(Box(tmp_path / "empty").machine).hider
    texts = {str(words): " ".join(map(hider.word, words)) for words in planted.words}
    without(texts, planted)


def test_every_option_that_leads_to_a_secret_is_known() -> None:
    """A new one must be looked into, or its secrets could get into a report."""
    looks = re.compile("secret|password|chap|psk|tls|token|account|key", re.ASCII)
    harmless = {
        *("chap-secret-fd", "chap-secret-credential"),  # of the command itself, which it has read
        *("target-password",),  # is one
        *("reserve-key",),  # of reservations; any initiator can read it
        *("chap-user", "tls", "tls-verify-peer"),
    }
    top = click.Context(cli, info_name="iserblk")
    found = set(OPTION_NAMES)
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        found.update(each.lstrip("-") for each in names_of(command, click.Context(command)))
    assert {each for each in found if looks.search(each)} <= OPTIONS.keys() | harmless


def test_what_is_read_of_a_portal() -> None:
    finding = Finding("login", ERROR, "refused", "ask", 0.123456789)
    report = PortalReport("h:1", "iser://h:1/iqn.x", [finding], None, TransportError("x"))
    assert portal_json(report) == {
        "address": "h:1",
        "url": "iser://h:1/iqn.x",
        "findings": [
            {"name": "login", "status": "error", "text": "refused", "remedy": "ask",
             "seconds": 0.123457}
        ],
        "provider": None,
        "traditional": False,
        "works": False,
        "exit_status": 4,
    }  # fmt: skip


# --- the whole command ---------------------------------------------------------------------------


@contextmanager
def running(words: list[str], variables: dict[str, str]) -> Iterator[None]:
    """A process with this command line, which waits until it is ended."""
    with subprocess.Popen(
        [*words[:1], "-c", "import sys; sys.stdin.read()", *words[1:]],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        env={**environment(), **variables},
    ) as process:
        try:  # its command line is there a moment after it was started
            until_blocking(lambda: process.pid in [each.pid for each in processes(Machine())])
            yield
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's report may lack processes")
def test_the_whole_command_tells_no_secret(tmp_path: Path) -> None:
    """With CHAP, and secrets in the URL, variables, a named LUN, a process and the log."""
    iqn = f"{IQN}-{secrets.token_hex(4)}"  # the sockets of metrics are those of the machine
    own, theirs, wrong = "url-secret-2026", "their-secret-2026", "file-secret-2026"
    typed, inherited, logged = "typed-secret-2026", "inherited-secret-26", "logged-secret-2026"
    (tmp_path / "accounts").write_text(f"alice:{own}\n")
    (tmp_path / "theirs").write_text(f"{theirs}\n")
    (tmp_path / "named.conf").write_text(f"URL=iser://bob@127.0.0.1/{iqn}/0\n")
    (tmp_path / "named.chap").write_text(f"{wrong}\n")
    for name in ("accounts", "theirs", "named.conf", "named.chap"):
        (tmp_path / name).chmod(0o600)
    lines = [f"iser://u%{logged}@h/{iqn}", f"{typed} {inherited} {wrong} {theirs} {own}"]
    row = json.dumps({"MESSAGE": " and ".join(lines), "SYSLOG_IDENTIFIER": "iserblk-nbd"})
    program = tmp_path / "bin/journalctl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{row}\nEOF\n")
    program.chmod(0o755)
    arguments = ["target", "--listen", "127.0.0.1:0", "--iqn", iqn, "--lun"]
    arguments += [f"{tmp_path}/disk:size=1M", "--chap-accounts", f"{tmp_path}/accounts"]
    arguments += ["--chap-user", "t", "--chap-secret-file", f"{tmp_path}/theirs"]
    with (
        serving(*arguments, log=tmp_path / "log") as target,
        running(["iserblk", "info", f"iser://u%{typed}@h/{iqn}"], {"CHAP_PASSWORD": inherited}),
    ):
        url = target.url.replace("://", f"://alice%{own}@") + f"?target_password={theirs}"
        changes = {
            "PATH": f"{program.parent}:{environment()['PATH']}",
            "ISERBLK_CONFIG_DIR": str(tmp_path),
            "LIBISCSI_CHAP_PASSWORD": inherited,
        }
        file = tmp_path / "report.html"
        said = [
            iserblk("doctor", url, *words, cwd=None, **changes)
            for words in (("--html", file), ("--html", "-"), ("--json",))
        ]
    assert [(done.returncode, done.stderr) for done in said] == [(0, "")] * 3
    texts = [file.read_text(), *(done.stdout for done in said)]
    for secret in (own, theirs, wrong, typed, inherited, logged):
        assert [secret in text for text in texts] == [False] * 4
    report = json.loads(said[2].stdout)
    assert report["log"][0]["text"].startswith("iser://…@h/")
    (use,) = [each for each in report["uses"] if each["pid"] == target.process.pid]
    assert (use["what"], use["state"], use["remedy"]) == ("target", "serving", "")
    assert "iser://…@h/" in texts[0] and "iser://…@h/" in texts[2]
    assert [f"info iser://…@h/{iqn}" in " ".join(each["command_line"])
            for each in report["processes"]].count(True) == 1  # fmt: skip
