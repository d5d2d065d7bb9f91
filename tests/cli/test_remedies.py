"""Every remedy that names a command or an option of iserblk is one that iserblk takes.

The source is walked for texts, as it stands: so a new message with an option that does not exist
fails here, whether or not another test raises it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fuse_mount.options import FLAGS, NUMBERS
from iserblk.cli.command import names_of
from iserblk.cli.main import COMMANDS, cli
from iserblk.options import OPTION_NAMES
from iserblk.target.lunspec import KEYS
from tests.support.target import ROOT

SOURCES = [
    path.relative_to(ROOT)
    for package in ("iserblk", "fuse_mount", "nbd_plugin")
    for path in sorted((ROOT / package).rglob("*.py"))
]
HOLE = "\0"  # what a text gets when it is raised
VERBS = ("for", "is", "uses", "runs", "that", "reservation")  # words behind the name of the project
# Options of other programs, and a word of the texts that have them.
FOREIGN = {
    **dict.fromkeys(("--user", "--python", "--break-system-packages"), ("pip", " --")),
    **dict.fromkeys(("--force-reinstall", "--no-deps"), ("source archive",)),
    "--system-site-packages": ("environment made",),
    "--reinstall": ("apt-get",),
    "--flushbufs": ("blockdev",),
    "--device": ("container",),
}
# Where texts are about some commands alone. Of cli/NAME.py it is the command NAME.
OF_ROOM = {
    "iserblk/target": ("target",),
    "iserblk/credentials.py": ("target",),
    "iserblk/nbd/kernel": ("attach", "detach"),
    "iserblk/nbd": ("nbd", "exporter"),
    "iserblk/named/open_iscsi.py": ("import",),
    "iserblk/named/files.py": ("add",),
    "iserblk/cli/importing.py": ("import",),
    "fuse_mount": ("mount", "umount"),
}
# Words in front of =, in texts, that are no options of a connection, a mount or a LUN's file.
OTHER_KEYS = {
    *("uri", "nbds_max", "max_part", "transport", "scope", "key", "version", "charset"),
}
# A piece of HTML, its style or its script.
_OF_A_PAGE = r":root\{|</?[A-Za-z!][a-z0-9]*[ >]|^\s*\"use strict\""
TOP = click.Context(cli, info_name="iserblk")


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each string but docstrings; HOLE stands for what is filled in."""
    tree = ast.parse(source)
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out.add(node.value)
        if isinstance(node, ast.JoinedStr):
            left_out.update(node.values)
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    str(each.value) if isinstance(each, ast.Constant) else HOLE
                    for each in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def commands_of(path: Path) -> tuple[str, ...]:
    """The commands that say the texts of a module."""
    name = str(path)
    for room, commands in OF_ROOM.items():
        if name == room or name.startswith(f"{room}/"):
            return commands
    own = path.stem if name.startswith("iserblk/cli/") else ""
    return (own,) if own in COMMANDS else tuple(COMMANDS)


def command_of(name: str) -> click.Command:
    command = cli.get_command(TOP, name)
    assert command is not None
    return command


def takes(command: str, words: list[str]) -> str:
    """Whether the command can be called with these words, and perhaps with arguments behind them;
    "": it can, else what it says."""
    said = ""
    for more in range(4):
        try:
            command_of(command).make_context(command, [*words, *["URL"] * more], parent=TOP)
        except click.MissingParameter as error:
            said = error.format_message()
        except click.UsageError as error:
            return error.format_message()
        else:
            return ""
    return said


def wrong_in(text: str, said_by: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with the commands and options that a text names."""
    for match in re.finditer(r"\biserblk ([a-z][a-z-]*)(?![\w@.-])", text):
        if match[1] not in COMMANDS and match[1] not in VERBS:
            yield f"there is no command {match[1]}"

    def call(match: re.Match[str]) -> str:
        command, *words = shlex.split(match[1].replace(HOLE, "X").replace("…", ""))
        if command in COMMANDS and (said := takes(command, words)):
            found.append(f"iserblk {match[1]}: {said}")
        return ""

    found: list[str] = []
    rest = re.sub(r"`iserblk ([a-z][^`]*)`", call, text)
    yield from found
    if " " not in text.strip():
        return  # an argument for another program, or a name
    known = {"--help", "--help-all", *names_of(cli, TOP)}
    for command in said_by:
        within = click.Context(command_of(command), parent=TOP, info_name=command)
        known.update(names_of(command_of(command), within))
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*(?![\w…-])", rest):
        if option not in known and not any(word in text for word in FOREIGN.get(option, ())):
            yield f"{' and '.join(said_by)} have no option {option}"
    keys = {*OPTION_NAMES, *KEYS, *FLAGS, *NUMBERS, *OTHER_KEYS}
    for key in re.findall(r"(?<![\w.%/-])([a-z][a-z_-]+)=(?=[A-Za-z0-9])", rest):
        if key.replace("_", "-") not in keys and key not in keys:
            yield f"there is no option {key}="


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_remedies_are_what_iserblk_takes(path: Path) -> None:
    wrong = [
        f"{path}:{line}: {words}: {text!r}"
        for line, text in texts_of((ROOT / path).read_text(encoding="utf-8"))
        if not re.search(_OF_A_PAGE, text)
        for words in wrong_in(text, commands_of(path))
    ]
    assert wrong == []


def test_the_walk_finds_remedies() -> None:
    """Else it would find nothing wrong with them, either."""
    texts = [text for path in SOURCES for _, text in texts_of((ROOT / path).read_text())]
    assert sum("`iserblk " in text for text in texts) > 15
    assert sum(" --" in text for text in texts) > 30


@pytest.mark.parametrize(
    ("source", "said_by", "words"),
    [
        ('x("see `iserblk frobnicate`")', ("info",), "no command frobnicate"),
        ('x("run `iserblk attach --remplace URL /dev/nbd0`")', ("info",), "--remplace"),
        ('x(f"run `iserblk show {a} {b}`")', ("info",), "unexpected extra argument"),
        ('x("give `iserblk target --rcap`")', ("target",), "requires an argument"),
        ('x(f"{a}: give --header-digest")', ("info",), "info have no option --header-digest"),
        ('x("leave out --rcap " + "verbs")', ("umount",), "umount have no option --rcap"),
        ('x("on with style=stream, or headr=12")', ("info",), "no option headr="),
        ('x("say `iserblk attach --replace URL /dev/nbd0`, --json")', ("umount",), "--json"),
    ],
)
def test_the_walk_finds_what_is_wrong(source: str, said_by: tuple[str, ...], words: str) -> None:
    found = [each for _, text in texts_of(source) for each in wrong_in(text, said_by)]
    assert len(found) == 1 and words in found[0]
