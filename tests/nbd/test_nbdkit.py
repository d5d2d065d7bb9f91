"""What our command hears of its nbdkit. With a real one: tests/cli/test_nbd.py."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.errors import AuthenticationError, IserblkError, ScsiError, TransportError
from iserblk.nbd import nbdkit

URL = "iser://127.0.0.1:1/iqn.2026-11.example:x/0"

# Runs the plugin as nbdkit does, in a locale without UTF-8, with a login that does this.
NBDKIT = """#!{python} -P
import os, sys
if os.environ.pop("PYTHONUTF8", "") != "0":
    os.environ.update(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    os.execv(sys.executable, [sys.executable, "-P", *sys.argv])
from types import SimpleNamespace
sys.modules["nbdkit"] = SimpleNamespace(debug=lambda _text: None)
path = sys.argv[sys.argv.index("python") + 1]
plugin = {{"__name__": "__main__"}}
exec(compile(open(path, encoding="utf-8").read(), path, "exec"), plugin)
from iserblk.errors import AuthenticationError, IserblkError, RemoteProtocolError
from iserblk.commands.running import PortRefused
class MissingKey(RemoteProtocolError):
    pass
def login(_urls, _options):
    {what}
plugin["open_disks"] = login
plugin["after_fork"]()
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As ``serve`` leaves its own: it is the last thing that a process does."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def serve(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether it was ready. ``what``: of the plugin's login."""
    program = tmp_path / "nbdkit"
    program.write_text(NBDKIT.format(python=sys.executable, what=what))
    program.chmod(0o755)
    monkeypatch.setattr(nbdkit, "nbdkit_program", lambda: str(program))
    ready: list[bool] = []
    with socket.socket(socket.AF_UNIX) as sock:
        assert nbdkit.serve(sock, [URL], {}, [], lambda: ready.append(True)) == 0
    return bool(ready)


def test_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve("return SimpleNamespace(ending=None)", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ('AuthenticationError("x ü", 0x201)', AuthenticationError, "x ü"),
        ('MissingKey("iSCSI", "no key")', TransportError, "iSCSI: no key"),
        ('PortRefused("standby")', ScsiError, "standby"),
        ('IserblkError("")', IserblkError, ""),
        ('OSError("broken")', IserblkError, "nbdkit does not start: OSError: broken"),
    ],
)
def test_a_login_that_fails(
    error: str, kind: type, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever class the error is, and whatever characters its text has."""
    with pytest.raises(IserblkError) as caught:
        serve(f"raise {error}", tmp_path, monkeypatch)
    assert type(caught.value) is kind and str(caught.value) == words
