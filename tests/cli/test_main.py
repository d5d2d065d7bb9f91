"""Errors become one line and an exit status; help is quick."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import click
import pytest

from iserblk import __version__, errors
from iserblk.cli import main
from tests.cli import commands
from tests.cli.commands import COMMAND, LIMIT_S, bad, environment, good, iserblk
from tests.support.target import ROOT


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """`iserblk info` raises the exception that a test puts into the list."""
    raised: list[BaseException] = []

    @click.command("info")
    def command() -> None:
        raise raised[0]

    monkeypatch.setattr("iserblk.cli.info.command", command)
    # main changes its process, which it expects to own: those changes are kept out of this one.
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    return raised


def status_of_main() -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["info"])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.IserblkError("x"), 1),
        (errors.LocalProtocolError("x"), 1),
        (errors.ConnectFailed("x"), 4),
        (errors.ConnectionLost("x"), 4),
        (errors.RemoteProtocolError("iSER", "x"), 4),
        (errors.LoginError("x"), 5),
        (errors.BadArgument("x"), 7),
        (errors.ConnectTimeout("x"), 8),
        (errors.CommandTimeout("x"), 11),
        (errors.PermissionDenied("x"), 13),
        (errors.WriteProtected("x"), 13),
        (errors.OutOfSpace("x"), 1),
        (errors.TargetNotFound("x"), 21),
        (errors.NoSuchLun("x"), 21),
        (errors.HostNotFound("x"), 23),
        (errors.AuthenticationError("x"), 24),
        (errors.NotSupported("x"), 27),
        (errors.Busy("x"), 28),
        (KeyboardInterrupt(), 130),
        (click.UsageError("x"), 7),
        (click.ClickException("x"), 1),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exit_statuses(failing: list[BaseException], error: BaseException, status: int) -> None:
    failing.append(error)
    assert status_of_main() == status


def test_an_error_is_one_line(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(errors.BadArgument("first\nsecond"))
    status_of_main()
    out, err = capsys.readouterr()
    assert (out, err) == ("", "iserblk: first second\n")


def test_a_missing_package_is_named(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(ModuleNotFoundError("No module named 'rich'", name="rich"))
    status_of_main()
    _, err = capsys.readouterr()
    assert "rich" in err and "scripts/setup" in err


def test_a_missing_module_of_ours_is_a_bug(failing: list[BaseException]) -> None:
    failing.append(ModuleNotFoundError("No module named 'iserblk.x'", name="iserblk.x"))
    with pytest.raises(ModuleNotFoundError):
        main.main(["info"])


def test_the_package_is_a_program() -> None:
    for module in ("iserblk", "iserblk.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"],
            capture_output=True, text=True, check=True, cwd=ROOT,
        )  # fmt: skip
        assert done.stdout == f"iserblk {__version__}\n"


def test_help_lists_every_command() -> None:
    lines = good("--help").splitlines()
    listed = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]]
    assert listed == list(main.COMMANDS)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is started, not forked, so that it must import what its help needs."""
    monkeypatch.setattr(commands, "STARTED", True)
    assert good(name, "--help").startswith(f"Usage: iserblk {name} ")


def test_help_imports_nothing_slow() -> None:
    script = (
        "import sys; from iserblk.cli import main; sys.argv[1:] = ['--help']\n"
        "try: main.main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0
    slow = {"trio", "rich", "pyfuse3", "crc32c", "iserblk.disk.aio", "iserblk.target.server"}
    assert not slow & set(done.stderr.split())


def test_version() -> None:
    assert good("--version").startswith("iserblk ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        ([], "Missing command"),
        (["info"], "Missing argument 'URL…'"),
        (["discover", "a", "b"], "unexpected extra argument"),
        (["trim", "x", "--offset", "far"], "give a size"),
        (["bench", "x", "--rw", "trim"], "--rw"),
        (["nbd", "x"], "--socket PATH or --listen"),
        (["nbd", "x", "--socket", "s", "--listen", "h:1"], "--socket PATH or --listen"),
        (["target", "--iqn", "iqn.2026-11.example:a"], "--lun"),
        (["discover", "a/b"], "HOST[:PORT]"),
    ],
)
def test_wrong_usage_is_7(arguments: list[str], words: str) -> None:
    if arguments:
        assert words in bad(7, *arguments)
    else:
        assert iserblk().returncode == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mount"], "Missing argument"),
        (["mount", "iser://h/iqn.2026-11.example:a"], "Missing argument 'MOUNTPOINT'"),
        (["mount", "/mnt"], "Missing argument 'URL…'"),
        (["mount", "nothing"], "there is no LUN named nothing in"),
        (["mount", "-x"], "No such option"),
        (["umount"], "Missing argument"),
    ],
)
def test_wrong_usage_of_mount_is_1(arguments: list[str], words: str) -> None:
    assert words in bad(1, *arguments)


def test_nobody_reads() -> None:
    """The pipe's reading end is closed before anything is written."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:
        gone.wait()
        done = subprocess.run(
            [*COMMAND, "--help"],
            stdout=gone.stdin,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment(),
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_name_that_stdout_cannot_write_is_shown_with_escapes(tmp_path: Path) -> None:
    (tmp_path / "disk.conf").write_text(
        "URL=iser://127.0.0.1/iqn.2026-11.example:x/0\nMOUNTPOINT=/mnt/名\n"
    )
    done = subprocess.run(
        [*COMMAND, "list"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(ISERBLK_CONFIG_DIR=str(tmp_path), PYTHONIOENCODING="latin-1"),
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "/mnt/\\u540d" in done.stdout


@pytest.mark.parametrize("value", ["x@loud", "alice%loud@host", "alice:loud@host:1", "a%b@loud:1"])
@pytest.mark.parametrize(
    "words",
    [
        "target --iqn iqn.2026-11.example:x --lun /x:size=1M --slp-da {}",
        "target --iqn iqn.2026-11.example:x --lun /x:size=1M --isns={}",
        "target --iqn iqn.2026-11.example:x --lun /x:size=1M --listen {},x",
        "target --iqn iqn.2026-11.example:x --lun /x:size=1M --header {}",
        "target --iqn {} --lun /x:size=1M",
        "target --iqn iqn.2026-11.example:x --lun {}/x:ro:block=512",
        "target --iqn iqn.2026-11.example:x --lun {}/x:size=1M",
        "info iser://127.0.0.1:1/iqn.2026-11.example:x/0 --metrics {}",
        "info iser://127.0.0.1:1/iqn.2026-11.example:x/0 --portals {}",
        "attach iser://127.0.0.1:1/iqn.2026-11.example:x/0 -o {}",
        "discover {}",
        "attach {} /dev/nbd0",
        "detach {}",
        "exporter --listen {}",
        "csi --node-id x --endpoint {}",
    ],
)
def test_what_may_be_user_info_is_not_shown(
    words: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of a URL, out of place: a secret may stand on either side of the @."""
    with pytest.raises(SystemExit) as caught:
        main.main(words.format(value).split())
    said = "".join(capsys.readouterr())
    assert caught.value.code and said.startswith("iserblk: ") and "loud" not in said


def test_paths_are_shown() -> None:
    words = ["copy", "/srv/a@b.img", "--x=c@d"]
    text = "/srv/a@b.img: no such file, nor c@d"
    assert main.without_user_info(text, words) == "/srv/a@b.img: no such file, nor …@…"
