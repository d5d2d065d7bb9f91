"""Completions, in the shells themselves. `iserblk` there prints its arguments, one a line; it is
the real one where the completion asks for targets."""

from __future__ import annotations

import os
import pty
import shlex
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from manlib.commands import commands

from fuse_mount.options import FLAGS
from iserblk.cli.main import COMMANDS
from iserblk.options import OPTION_NAMES
from tests.scripts.manual import make
from tests.support.nbdkit import need
from tests.support.target import IQN, ROOT, running_target

PROMPT = "READY> "
BASH = "share/bash-completion/completions/iserblk"


class Place:
    """A directory with what completions look for, and files of completions that look there."""

    def __init__(self, directory: Path, made: Path) -> None:
        self.directory = directory
        conf, run, dev = directory / "conf", directory / "run", directory / "dev"
        for each in (conf, run / "nbd3", run / "nbd12", dev, directory / "bin"):
            each.mkdir(parents=True)
        for name in ("disk.conf", "data.conf", "disk.chap"):
            (conf / name).touch()
        for name in ("nbd0", "nbd3", "nbd3p1", "nbd12", "null"):
            (dev / name).touch()
        self.mounts = directory / "mounts"
        self.mounts.write_text(
            "proc /proc proc rw 0 0\n"
            "iser://host/iqn.x:a /mnt/luns fuse.iserblk rw 0 0\n"
            "iser://host/iqn.x:b /mnt/two\\040words fuse.iserblk rw 0 0\n"
        )
        self.asked = directory / "asked"
        program = directory / "bin/iserblk"
        program.write_text(
            "#!/bin/sh\n"
            'case $1 in -q)\n'
            f"  echo \"$*\" >>{shlex.quote(str(self.asked))}\n"
            f'  exec {sys.executable} -P -m iserblk.cli "$@" ;;\n'
            "esac\n"
            "echo BEGIN\n"
            'for word; do printf "<%s>\\n" "$word"; done\n'
            "echo END\n"
        )  # fmt: skip
        program.chmod(0o755)
        self.files: dict[str, Path] = {}
        for path in made.rglob("*iserblk*"):
            if path.is_file() and path.parts[-2][:3] != "man":
                text = path.read_text(encoding="utf-8")
                text = text.replace("=/etc/iserblk", f"={conf}").replace("/run/iserblk/", f"{run}/")
                text = text.replace("/proc/self/mounts", str(self.mounts))
                text = text.replace("in /dev/nbd", f"in {dev}/nbd")
                copy = directory / path.name
                copy.write_text(text, encoding="utf-8")
                self.files[path.name] = copy

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.directory}/bin:/usr/bin:/bin",
            "HOME": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
            "TERM": "dumb",
            "INPUTRC": "/dev/null",
        }


class Terminal:
    """A shell at a terminal."""

    def __init__(self, words: list[str], place: Place) -> None:
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        termios.tcsetwinsize(slave, (100, 400))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *words],
            stdin=slave, stdout=slave, stderr=slave, env=place.environment, cwd=place.directory,
        )  # fmt: skip
        os.close(slave)
        self._until(PROMPT)

    def _until(self, *ends: str) -> str:
        """What comes, up to these texts, one after the other."""
        seen, at = "", 0
        for end in ends:
            while end not in seen[at:]:
                seen += os.read(self._master, 65536).decode().replace("\r", "")
            at = seen.index(end, at) + len(end)
        return seen

    def arguments(self, keys: bytes) -> list[str]:
        """What `iserblk` got after these keys, and a Return."""
        os.write(self._master, keys + b"\r")
        self.said = self._until("\nEND\n", PROMPT)
        between = self.said.rpartition("BEGIN\n")[2].partition("END\n")[0]
        return [line[1:-1] for line in between.splitlines()]

    def close(self) -> None:
        os.close(self._master)  # SIGHUP
        self.process.wait()


@pytest.fixture(scope="module")
def place(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("completion"), made)


@contextmanager
def running_bash(place: Place, *more: str) -> Iterator[Terminal]:
    """A bash in which M-* inserts all completions."""
    need("bash", "setsid")
    begin = place.directory / "bashrc"
    lines = [
        f"PS1='{PROMPT}'",
        "bind 'set enable-bracketed-paste off' 'set bell-style none' 2>/dev/null",
        f"source {place.files['iserblk']}",
        *more,
    ]
    begin.write_text("\n".join([*lines, ""]))
    terminal = Terminal(["bash", "--noprofile", "--rcfile", str(begin), "-i"], place)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def bash(place: Place) -> Iterator[Terminal]:
    with running_bash(place) as terminal:
        yield terminal


def all_in_bash(bash: Terminal, line: str) -> list[str]:
    return bash.arguments(f"{line}\x1b*".encode())


LINES = [
    ("iserblk att", ["attach"]),
    ("iserblk -v umo", ["-v", "umount"]),
    ("iserblk --ver", ["--verbose", "--version"]),
    ("iserblk attach --re", ["attach", "--replace", "--reserve", "--reserve-key"]),
    ("iserblk attach --rcap ", ["attach", "--rcap", "auto", "iwarp", "iwarp-sctp", "verbs"]),
    ("iserblk target --rcap ", ["target", "--rcap", "iwarp", "verbs"]),
    ("iserblk info --rcap=v", ["info", "--rcap=verbs"]),
    ("iserblk bench --rw randw", ["bench", "--rw", "randwrite"]),
    ("iserblk nbd --tls req", ["nbd", "--tls", "require"]),
    ("iserblk attach -o rcap=ve", ["attach", "-o", "rcap=verbs"]),
    ("iserblk mount -o ro,allow", ["mount", "-o", "ro,allow_other"]),
    ("iserblk mount -o ro,uid=5,fallback=i", ["mount", "-o", "ro,uid=5,fallback=iscsi"]),
    ("iserblk info d", ["info", "data", "disk"]),
    ("iserblk info isc", ["info", "iscsi://"]),
    ("iserblk stats da", ["stats", "data"]),
    ("iserblk stat", ["stats", "status"]),
    ("iserblk detach {dev}", ["detach", "/dev/nbd12", "/dev/nbd3"]),
    ("iserblk umount /mnt/l", ["umount", "/mnt/luns"]),
    ("iserblk umount /mnt/t", ["umount", "/mnt/two words"]),
    ("iserblk umount /nothing", ["umount", "/nothing"]),
    ("iserblk frobnicate ", ["frobnicate"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "arguments"), LINES)
def test_bash(line: str, arguments: list[str], bash: Terminal) -> None:
    assert all_in_bash(bash, line.replace("{dev}", "/dev/")) == arguments


def test_bash_completes_every_command_and_option(bash: Terminal) -> None:
    assert set(all_in_bash(bash, "iserblk ")) == set(COMMANDS)
    for command in commands():
        wanted = {name for option in command.options for name in option.names}
        assert set(all_in_bash(bash, f"iserblk {command.name} -")[1:]) == wanted


def test_bash_completes_every_option_of_o(bash: Terminal) -> None:
    names = {f"{name}=" for name in OPTION_NAMES if name != "target-password"}
    assert set(all_in_bash(bash, "iserblk attach -o ")[2:]) == names
    of_mount = set(all_in_bash(bash, "iserblk mount -o ")[2:])
    assert of_mount == names | set(FLAGS) | {"uid=", "gid=", "umask="}


def test_bash_completes_devices_and_files(bash: Terminal, place: Place) -> None:
    found = all_in_bash(bash, f"iserblk attach disk {place.directory}/dev/")
    assert [Path(each).name for each in found[2:]] == ["nbd0", "nbd12", "nbd3"]
    (place.directory / "a file.img").touch()
    (place.directory / "a folder").mkdir()
    assert all_in_bash(bash, "iserblk copy disk a") == ["copy", "disk", "a file.img", "a folder/"]
    assert all_in_bash(bash, "iserblk compare a") == ["compare", "a file.img", "a folder/"]
    assert all_in_bash(bash, "iserblk serve a") == ["serve", "a file.img", "a folder/"]
    assert all_in_bash(bash, "iserblk nbd --pidfile a\\ fi") == [
        *("nbd", "--pidfile", "a file.img")
    ]
    assert all_in_bash(bash, "iserblk mount disk a") == ["mount", "disk", "a folder/"]
    assert all_in_bash(bash, "iserblk attach --chap-secret-file=a\\ file") == [
        "attach", "--chap-secret-file=a file.img"
    ]  # fmt: skip


def test_bash_needs_no_special_characters_of_readline(place: Place) -> None:
    """Some set COMP_WORDBREAKS to go without : and =."""
    with running_bash(place, "COMP_WORDBREAKS=${COMP_WORDBREAKS//[:=]/}") as terminal:
        assert all_in_bash(terminal, "iserblk info --rcap=v") == ["info", "--rcap=verbs"]
        assert all_in_bash(terminal, "iserblk info isc") == ["info", "iscsi://"]


def test_bash_completes_the_names_that_commands_would_find(place: Place) -> None:
    """Root has those of the machine; others also have their own. A directory that is named stands
    for both."""
    other, own = place.directory / "other", place.directory / ".config/iserblk"
    for directory, name in ((other, "elsewhere"), (own, "mine")):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.conf").touch()
    program = place.directory / "bin/id"
    for user, more in ((0, []), (1000, ["mine"])):
        program.write_text(f"#!/bin/sh\necho {user}\n")
        program.chmod(0o755)
        with running_bash(place) as bash:
            assert all_in_bash(bash, "iserblk show ") == ["show", "data", "disk", *more]
    program.unlink()
    with running_bash(place, f"export ISERBLK_CONFIG_DIR={other}") as bash:
        assert all_in_bash(bash, "iserblk show ") == ["show", "elsewhere"]


@pytest.fixture
def portals(tmp_path: Path) -> Iterator[str]:
    with running_target([f"{tmp_path}/lun:size=1M"], tmp_path / "log") as target:
        yield target.listen


def test_bash_completes_targets_of_a_portal(place: Place, portals: str) -> None:
    """It asks the portal once."""
    place.asked.unlink(missing_ok=True)
    with running_bash(place) as bash:
        for typed in ("", "iqn.", f"{IQN[:-4]}"):
            found = all_in_bash(bash, f"iserblk info iser://{portals}/{typed}")
            assert found == ["info", f"iser://{portals}/{IQN}"]
        assert place.asked.read_text() == f"-q discover -- iser://{portals}\n"
        assert all_in_bash(bash, f'iserblk info "iser://{portals}/i') == [
            "info", f"iser://{portals}/{IQN}"
        ]  # fmt: skip
        found = all_in_bash(bash, f"iserblk copy iscsi://{portals}/")
        assert found == ["copy", f"iscsi://{portals}/{IQN}"]


def test_bash_asks_no_portal_where_that_would_show_a_secret(bash: Terminal, place: Place) -> None:
    place.asked.unlink(missing_ok=True)
    for url in ("iser://user%hush@host/", "iser://host/iqn.x:a/", "isns://host/"):
        assert all_in_bash(bash, f"iserblk info {url}") == ["info", url]
    assert not place.asked.exists()


def test_bash_says_nothing_of_a_portal_that_does_not_answer(bash: Terminal) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        url = f"iser://127.0.0.1:{reserved.getsockname()[1]}/"
        assert all_in_bash(bash, f"iserblk info {url}") == ["info", url]
    assert "iserblk:" not in bash.said and "Terminated" not in bash.said


LOADER = Path("/usr/share/bash-completion/bash_completion")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["man", "-w", "iserblk", "iserblk-url"], "share/man/man1/iserblk.1\n"),
        (
            ["bash", "-c", f"source {LOADER}; _completion_loader iserblk; complete -p iserblk"],
            "-F _iserblk iserblk",
        ),
        (
            ["zsh", "-fc", "fpath=(~/.local/share/zsh/site-functions $fpath);"
             "autoload -U compinit; compinit -u -D; echo $_comps[iserblk]"],
            "_iserblk",
        ),
        (["fish", "-c", 'complete -C "iserblk att"'], "attach\t"),
    ],
)  # fmt: skip
def test_where_man_and_shells_look(words: list[str], found: str, tmp_path: Path) -> None:
    """As docs/using.md has it for one user, whose programs are in ~/.local/bin."""
    need(words[0])
    if words[0] == "bash" and not LOADER.exists():
        pytest.skip("not installed: bash-completion (scripts/setup --tests installs it)")
    assert make(tmp_path / ".local").returncode == 0
    program = tmp_path / ".local/bin/iserblk"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(tmp_path), "PATH": f"{program.parent}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert found in done.stdout


# --- zsh -----------------------------------------------------------------------------------------


@contextmanager
def running_zsh(place: Place) -> Iterator[Terminal]:
    """A zsh in which the tab key inserts all completions."""
    need("zsh", "setsid")
    lines = [
        "setopt no_prompt_cr no_prompt_sp no_beep interactive_comments",
        f"fpath=({place.directory} $fpath)",
        "autoload -U compinit",
        "compinit -u -D",
        "zstyle ':completion:*' completer _all_matches _complete",
        "zstyle ':completion:*' insert yes",
        f"PS1='{PROMPT}'",
    ]
    (place.directory / ".zshenv").write_text("setopt no_global_rcs\n")
    (place.directory / ".zshrc").write_text("\n".join([*lines, ""]))
    terminal = Terminal(["zsh", "-i"], place)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def zsh(place: Place) -> Iterator[Terminal]:
    with running_zsh(place) as terminal:
        yield terminal


def all_in_zsh(zsh: Terminal, line: str) -> list[str]:
    return zsh.arguments(f"{line}\t".encode())


@pytest.mark.parametrize(("line", "arguments"), LINES)
def test_zsh(line: str, arguments: list[str], zsh: Terminal) -> None:
    assert sorted(all_in_zsh(zsh, line.replace("{dev}", "/dev/"))) == sorted(arguments)


def test_zsh_completes_every_command_and_option(zsh: Terminal) -> None:
    assert set(all_in_zsh(zsh, "iserblk ")) == set(COMMANDS)
    for command in commands():
        wanted = {name for option in command.options for name in option.names}
        assert set(all_in_zsh(zsh, f"iserblk {command.name} -")[1:]) == wanted


def test_zsh_completes_targets_of_a_portal(place: Place, portals: str) -> None:
    """It asks the portal once."""
    place.asked.unlink(missing_ok=True)
    with running_zsh(place) as zsh:
        for typed in ("", "iqn."):
            found = all_in_zsh(zsh, f"iserblk info iser://{portals}/{typed}")
            assert found == ["info", f"iser://{portals}/{IQN}"]
        assert place.asked.read_text() == f"-q discover -- iser://{portals}\n"
        url = "iser://user%hush@host/"
        assert all_in_zsh(zsh, f"iserblk info {url}") == ["info", url]
    assert len(place.asked.read_text().splitlines()) == 1


# --- fish ----------------------------------------------------------------------------------------


def all_in_fish(place: Place, *lines: str) -> list[list[str]]:
    """The words that fish offers for each line. (It shows them itself, without a terminal.)"""
    need("fish")
    ask = "\n".join(f"complete -C {shlex.quote(line)}; echo END" for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {place.files['iserblk.fish']}\n{ask}\n"],
        capture_output=True,
        text=True,
        check=False,
        env=place.environment,
        cwd=place.directory,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.split("END\n")[:-1]
    return [[line.partition("\t")[0] for line in each.splitlines()] for each in answers]


def test_fish(place: Place) -> None:
    lines = [(line.replace("{dev}", "/dev/"), arguments) for line, arguments in LINES
             if " /nothing" not in line and "frobnicate" not in line]  # fmt: skip
    answers = all_in_fish(place, *(line for line, _ in lines))
    for (line, arguments), offered in zip(lines, answers, strict=True):
        *given, word = line.split(" ")[1:]  # what stands before the word that is completed, and it
        # fish 4 names what has the word elsewhere, too, and shows that behind these.
        first = [each for each in offered if each.startswith(word)] or offered
        assert sorted(first) == sorted(arguments[len(given) :]), line


def test_fish_completes_every_command_and_option(place: Place) -> None:
    known = list(commands())
    first, *rest = all_in_fish(
        place, "iserblk ", *(f"iserblk {command.name} --" for command in known)
    )
    assert set(first) == set(COMMANDS)
    for command, offered in zip(known, rest, strict=True):
        names = {name for option in command.options for name in option.names}
        assert {name for name in names if name.startswith("--")} == set(offered)


def test_fish_completes_targets_of_a_portal(place: Place, portals: str) -> None:
    place.asked.unlink(missing_ok=True)
    line = f"iserblk info iser://{portals}/"
    secret = "iserblk info iser://user%hush@host/"
    answers = all_in_fish(place, line, f"{line}iqn.", secret)
    assert answers == [[f"iser://{portals}/{IQN}"], [f"iser://{portals}/{IQN}"], []]
    assert place.asked.read_text() == f"-q discover -- iser://{portals}\n"


def test_what_shells_quote() -> None:
    """The text stands in single quotes in three shells; fish also takes two backslashes for one."""
    text = (ROOT / "scripts/manlib/shells/lists.sh").read_text()
    assert "'" not in text and "\\\\" not in text
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)
