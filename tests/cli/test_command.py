"""The help of commands, and what they say of wrong usage: in this process, without a target."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import click
import pytest

from iserblk.cli.command import Command, Rare
from iserblk.cli.main import COMMANDS, cli, main
from iserblk.cli.options import CONNECTION, USUAL
from iserblk.options import OPTION_NAMES, Options, default_of
from tests.cli.ways import ended
from tests.support.target import ROOT

URL = "iser://127.0.0.1:1/iqn.2026-11.example:x/0"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """The exit status of a command, and what it prints on stdout and stderr."""
    with pytest.raises(SystemExit) as exited:
        main(words)
    return (exited.value.code, *capsys.readouterr())


def command_of(name: str) -> Command:
    command = cli.get_command(click.Context(cli, info_name="iserblk"), name)
    assert isinstance(command, Command), f"{name}: give it cls=Command"
    return command


def options_of(name: str) -> list[click.Option]:
    return [each for each in command_of(name).params if isinstance(each, click.Option)]


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_what_people_set(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A screen has room for it; what is left out is behind --help-all."""
    options = options_of(name)
    usual = [each for each in options if not isinstance(each, Rare)]
    assert len(usual) <= 12
    _, short, _ = said(capsys, name, "--help")
    assert len(short.splitlines()) < 50
    listed = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", short, re.MULTILINE)) - {
        "--help",
        "--help-all",
    }
    assert listed == {max(each.opts, key=len) for each in usual if each.opts != ["-o"]}
    assert ("--help-all" in short) == (len(usual) < len(options))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_shows_the_rest(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(name)
    if not any(isinstance(each, Rare) for each in options):
        status, _, complaint = said(capsys, name, "--help-all")
        assert status and "No such option '--help-all'" in complaint
        return
    status, text, complaint = said(capsys, name, "--help-all")
    assert (status, complaint) == (0, "")
    for each in options:
        assert re.search(rf"^  .*{re.escape(each.opts[0])}\b", text, re.MULTILINE), each.opts


def test_what_people_set_of_a_connection() -> None:
    assert set(USUAL) < {name for name, _, _ in CONNECTION}


def test_the_program_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Its status says that nothing was done."""
    _, shown, _ = said(capsys, "--help")
    assert said(capsys) == (7, shown, "")


@pytest.mark.parametrize(("module", "package"), [("grpc", "grpcio"), ("google", "protobuf")])
def test_csi_without_its_packages(module: str, package: str) -> None:
    """Help does without them. What is missing has the name that pip knows."""
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from iserblk.cli.main import main
try:
    main(["csi", "--help"])
except SystemExit as ended:
    assert not ended.code
main(["csi", "--endpoint", "unix:///nowhere/s"])
"""
    done = ended([sys.executable, "-c", script])
    assert done.returncode == 1 and done.stdout.startswith("Usage: iserblk csi ")
    assert done.stderr.startswith(f"iserblk: the Python package {package} is missing: ")


# --- defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, _, text in CONNECTION if "Default " in text])
def test_help_tells_the_defaults_of_the_code(name: str) -> None:
    (text,) = [text for each, _, text in CONNECTION if each == name]
    told = re.search(r"Default (\S+?)[.:]", text)
    assert told is not None
    assert Options.from_pairs([(name, told[1])]) == Options()


def test_the_document_tells_the_defaults_of_the_code() -> None:
    """The table of options, wherever it stands."""
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    rows = re.findall(r"^\| (`[^|]*`) \|.*\| ([^| ]+) \|$", pages, re.MULTILINE)
    told = {
        name: default
        for names, default in rows
        for name in re.findall("`([^`]+)`", names)
        if name in OPTION_NAMES and default != "random"
    }
    assert len(told) > 15
    for name, default in told.items():
        assert Options.from_pairs([(name, default)]) == Options(), name


def test_defaults_are_as_users_write_them() -> None:
    assert [default_of(name) for name in ("journal", "mpa-crc", "io-timeout", "mpa-frames")] == [
        "56M", "yes", "30", "auto",
    ]  # fmt: skip


def test_no_help_has_a_default_of_its_own() -> None:
    """`Default N` in the source would be true until somebody changes N."""
    for path in sorted((ROOT / "iserblk/cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"Default:? [0-9a-z]*[0-9]", node.value), (path, node.lineno)


# --- wrong usage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        ("inof", 7, "No such command 'inof': is it info?"),
        ("ls", 7, "is it `iserblk list`?"),
        ("help", 7, "is it `iserblk --help`?"),
        ("logs", 7, "No such command 'logs': a server in the background logs to syslog: `journ"),
        ("completion", 7, "`scripts/manpages` installs it from a clone (docs/using.md). See "),
        ("stop", 7, "`iserblk umount MOUNTPOINT` ends a mount"),
        ("frobnicate", 7, "No such command 'frobnicate'. See `iserblk --help`."),
        (URL, 7, "a URL stands behind a command, e.g. `iserblk info URL`"),
        (f"info {URL} --jsn", 7, "is it --json? See `iserblk info --help`."),
        (f"--json info {URL}", 7, "it stands behind the command: `iserblk info --json …`"),
        (f"info {URL} -v", 7, "it stands before the command: `iserblk -v info …`"),
        (f"mount {URL} /mnt --quiet", 1, "it stands before the command: `iserblk --quiet mount …`"),
        ("target --port 3260", 7, "No such option '--port': is it --listen? See"),
        (f"bench {URL} --background", 7, "No such option '--background'. See"),
        (f"compare {URL} -", 7, "compare reads no pipes"),
        (f"add {URL}", 7, "the name of a LUN is missing in front of it"),
        ("--jsn", 7, "No such option '--jsn'. See `iserblk --help`."),
        (f"info {URL} --header-digest crc32c", 7, "iscsi://HOST/TARGET-IQN/LUN?header-digest="),
        (f"copy {URL} x --auth md5", 7, "an option of URLs: iser://HOST/TARGET-IQN/LUN?auth="),
        (f"info {URL} --target_password=hush", 7, "put it into the file of chap-secret-file"),
        (f"nbd {URL} --socket", 7, "requires an argument. See `iserblk nbd --help`."),
        ("mount -o", 1, "requires an argument. See `iserblk mount --help`."),
        ("umount --io-timeout 5", 1, "No such option '--io-timeout'. See `iserblk umount --help`."),
        ("exporter --listen x", 7, "e.g. 127.0.0.1:13260"),
        ("copy x", 7, "copy takes two files, LUNs or devices: write the second behind it"),
        ("umount nowhere", 1, "no such directory, and no LUN of that name"),
        ("target --iqn iqn.2026-11.a:x --lun x:size=0", 7, "write a size such as 1G, or leave"),
        ("target --iqn iqn.2026-11.example:x --lun x:size=99999999T", 7, "no file is as large"),
    ],
)  # fmt: skip
def test_wrong_usage(
    words: str, status: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, complaint = said(capsys, *words.split())
    assert (code, shown) == (status, "")
    assert expected in complaint and "hush" not in complaint
    assert len(complaint.splitlines()) == 1
    assert not re.search(r"[?.!]\.|\)\?", complaint)


def test_a_named_lun_without_a_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to do differs: `mount` takes a place behind the name, `umount` in its stead."""
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(tmp_path))
    (tmp_path / "disk.conf").write_text(f"URL={URL}\n")
    _, _, complaint = said(capsys, "mount", "disk")
    assert "name it: `iserblk mount disk MOUNTPOINT`" in complaint
    _, _, complaint = said(capsys, "umount", "disk")
    assert "`findmnt -t fuse.iserblk` shows where" in complaint
