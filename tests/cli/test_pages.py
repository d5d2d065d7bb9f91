"""The pages for people who come from other programs, and for those who look for a fault: their
commands are run, their messages exist, and they know all that the doctor checks."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from iserblk.doctor import report
from iserblk.doctor.machine import Machine
from tests.cli.commands import bad, iserblk, serving
from tests.doctor.box import Box
from tests.named.node_records import put_record
from tests.support.target import IQN, ROOT, running_target

HOST = "storage.example"
PAGES = ("from-open-iscsi", "from-qemu", "troubleshooting")
# Commands that need root, and a device or a mount; each has tests of its own.
ROOTS = ("iserblk attach", "iserblk detach", "mount", "umount")
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in an empty directory."""
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(tmp_path / "named"))
    lines = commands(page(name))
    assert len(lines) >= 3
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    with ExitStack() as stack:
        target = stack.enter_context(
            running_target([f"{tmp_path}/lun:size=16M"], tmp_path / "target.log")
        )
        portal = target.listen
        put_record(nodes, IQN, changes=dict(zip(ADDRESS, portal.split(":"), strict=True)))
        for line in lines:
            if line.startswith(ROOTS):
                continue
            words = shlex.split(line.replace(HOST, portal))
            if words[:2] == ["iserblk", "import"]:
                words += ["--from", str(nodes)]
            if words[:2] == ["iserblk", "nbd"]:
                at = words.index("--socket") + 1
                words[at] = str(tmp_path / words[at])
                stack.enter_context(serving(*words[1:], log=tmp_path / "nbd.log"))
            elif words[0] == "iserblk":
                done = iserblk(*words[1:], cwd=tmp_path)
                assert done.returncode == 0, (line, done.stderr)
            elif shutil.which(words[0]) is None:
                pytest.skip(f"requires {words[0]}")
            else:
                subprocess.run(words, cwd=tmp_path, check=True, timeout=60, capture_output=True)


ADDRESS = ("node.conn[0].address", "node.conn[0].port")


def test_commands_that_need_root_have_their_options() -> None:
    for name in PAGES:
        for line in commands(page(name)):
            if line.startswith("iserblk "):
                words = shlex.split(line)
                command = next(word for word in words[1:] if not word.startswith("-"))
                told = iserblk(command, "--help").stdout
                for word in words:
                    assert not word.startswith("--") or word in told, line


def sources() -> Iterator[str]:
    """Each string of the program, with what is joined from several lines in one."""
    paths = [*(ROOT / "iserblk").rglob("*.py"), *(ROOT / "fuse_mount").rglob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def first_column(section: str, cells: str) -> set[str]:
    """What ``cells`` finds in the first column of the table behind the line ``section``."""
    text = TROUBLES.partition(f"{section}\n\n")[2].partition("\n\n")[0]
    assert text.startswith("| "), section
    found = re.findall(r"^\| (.*?) \|", text, re.M)
    return {name for cell in found for name in re.findall(cells, cell)}


def test_the_messages_exist() -> None:
    """Each message of the table is one of the program's."""
    messages = first_column("## What a command says", "`(.*?)`")
    assert len(messages) >= 12
    missing = set(messages)
    for text in sources():
        missing = {each for each in missing if each not in text}
    assert not missing


def test_messages_that_are_easily_seen(tmp_path: Path) -> None:
    messages = first_column("## What a command says", "`(.*?)`")
    with running_target([f"{tmp_path}/lun:size=1M"], tmp_path / "log") as target:
        url = target.url
        said = [
            bad(4, "info", f"iser://127.0.0.1:1/{IQN}"),
            bad(21, "info", url.replace(IQN, f"{IQN}2")),
            bad(21, "info", f"{url}/7"),
            bad(23, "info", f"iser://no-such-host.invalid/{IQN}"),
            bad(7, "info", "nosuchname"),
            bad(1, "mount", url, tmp_path),
        ]
    for line in said:
        assert any(each in line for each in messages), line


def test_all_that_the_doctor_checks(tmp_path: Path) -> None:
    """The page has each of its checks, and no other."""
    box = Box(tmp_path)
    box.device()
    names = set()
    for machine in (Machine(), box.machine):
        names |= {finding.name for finding in report.check_machine(machine)}
    names = {re.sub(r"^device .*", "device …", name) for name in names}
    assert first_column("On this machine:", "`(.*?)`") == names | {"RDMA devices", "memlock"}


def test_all_that_the_doctor_checks_of_a_portal() -> None:
    source = (ROOT / "iserblk/doctor/portal.py").read_text(encoding="utf-8")
    known = first_column("Of a portal:", "`(.*?)`")
    found = set(re.findall(r'_Answer\(f?"([a-zA-Z ]+?)(?: \{portal\})?"\)', source))
    assert known == found | {"TCP", "MPA", "rdma_cm"}
