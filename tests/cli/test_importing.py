"""`iserblk import`: named LUNs of open-iscsi's node records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.commands import bad, good, good_json, iserblk, serving
from tests.cli.runs import documented
from tests.named.node_records import put_record
from tests.support.target import IQN

DISK = "iqn.2026-11.example:disk"
SECRET, THEIRS = "hush-hush-hush", "not-a-word-more"
CHAP = {
    "node.session.auth.authmethod": "CHAP",
    "node.session.auth.username": "alice",
    "node.session.auth.password": SECRET,
}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "named"
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(path))
    return path


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes"
    path.mkdir()
    return path


def test_imported(nodes: Path, directory: Path) -> None:
    put_record(nodes, DISK, changes={"node.startup": "automatic", "node.session.scan": "manual"})
    put_record(nodes, f"{DISK}:2", changes=CHAP)
    shown = good("import", "--from", nodes, "--dry-run").splitlines()
    assert shown[:5] == [
        f"{DISK}: would be added, as disk",
        f"  iscsi://192.0.2.1:3260/{DISK}",
        "  option io-timeout=120/30",
        "  left out: node.session.scan = manual",
        "  open-iscsi logs in at boot",
    ]
    assert not directory.exists()
    said = good("import", "--from", nodes)
    assert "iscsiadm -m node -T IQN -u" in said
    assert "CHAP, one-way" in said and SECRET not in said
    assert sorted(os.listdir(directory)) == ["2.chap", "2.conf", "disk.conf"]
    assert (directory / "2.conf").read_text().splitlines() == [
        f"URL=iscsi://alice@192.0.2.1:3260/{DISK}:2",
        f"OPTIONS=io-timeout=120/30,chap-secret-file={directory}/2.chap",
    ]
    assert (directory / "2.chap").read_text() == f"{SECRET}\n"
    before = {path: path.read_bytes() for path in directory.iterdir()}
    again = good_json("import", "--from", nodes)["targets"]
    assert [(row["name"], row["outcome"]) for row in again] == [
        ("disk", "there already"),
        ("2", "there already"),
    ]
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_a_name_that_is_taken(nodes: Path, directory: Path) -> None:
    good("add", "disk", "iser://host/iqn.2026-11.example:other")
    put_record(nodes, DISK)
    (row,) = good_json("import", "--from", nodes)["targets"]
    assert (row["name"], row["outcome"]) == ("disk-2", "added")
    assert (directory / "disk.conf").read_text() == "URL=iser://host/iqn.2026-11.example:other\n"


def test_some_targets(nodes: Path, directory: Path) -> None:
    for number in range(3):
        put_record(nodes, f"{DISK}:{number}")
    (row,) = good_json("import", f"{DISK}:1".upper(), "--from", nodes)["targets"]
    assert row["target"] == f"{DISK}:1"
    assert os.listdir(directory) == ["1.conf"]
    line = bad(21, "import", f"{DISK}:7", "--from", nodes)
    assert f"no node record of {DISK}:7" in line


def test_json(nodes: Path) -> None:
    put_record(nodes, DISK, changes={**CHAP, "node.session.auth.password_in": THEIRS})
    put_record(nodes, f"{DISK}:x", changes={**CHAP, "node.session.auth.username": "al%ice"})
    done = iserblk("import", "--from", nodes, "--dry-run", "--json")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"left out: {DISK}:x: not possible: " in line and "the user's name" in line
    answer = json.loads(done.stdout)
    good_one, wrong = answer["targets"]
    assert (good_one["chap"], good_one["urls"]) == ("mutual", [f"iscsi://192.0.2.1:3260/{DISK}"])
    assert (wrong["outcome"], wrong["name"], wrong["urls"]) == ("not possible", "", [])
    assert set(good_one) | set(answer) == documented("import")
    assert SECRET not in json.dumps(answer) and THEIRS not in json.dumps(answer)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_file_that_is_no_record_is_left_out(dry_run: bool, nodes: Path, directory: Path) -> None:
    """It is named, the others are imported, and the status says that something is missing."""
    odd = put_record(nodes, f"{DISK}:1").with_name(".default.swp")
    odd.write_bytes(b"b0VIM\0")
    put_record(nodes, f"{DISK}:2").write_text("")
    for number in (0, 3):
        put_record(nodes, f"{DISK}:{number}")
    words = ["import", "--from", nodes, *(["--dry-run"] if dry_run else [])]
    done = iserblk(*words)
    assert done.returncode == 1
    shown = [line for line in done.stdout.splitlines() if line.startswith(DISK)]
    assert [line.partition(": ")[0] for line in shown] == [f"{DISK}:{each}" for each in (0, 1, 3)]
    first, second = done.stderr.splitlines()
    assert first.startswith(f"iserblk: left out: {odd}: ")
    assert second.startswith(f"iserblk: left out: {nodes}/{DISK}:2/")
    assert len(os.listdir(directory) if directory.exists() else []) == (0 if dry_run else 3)
    done = iserblk(*words, "--json")
    assert (done.returncode, len(json.loads(done.stdout)["unread"])) == (1, 2)


def test_what_is_wrong_with_others_does_not_concern_a_target(nodes: Path) -> None:
    put_record(nodes, DISK)
    record = put_record(nodes, f"{DISK}:1")
    record.write_text("")
    assert f"{DISK}: added, as disk" in good("import", "--from", nodes, DISK)
    assert f"{record}: " in bad(21, "import", "--from", nodes, f"{DISK}:1")


def test_no_nodes(tmp_path: Path) -> None:
    assert "--from names another" in bad(7, "import", "--from", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert good("import", "--from", tmp_path / "empty") == "open-iscsi has no node records\n"


def test_what_was_imported_can_be_used(nodes: Path, tmp_path: Path) -> None:
    """A login with CHAP, mutual, to the portal of the record."""
    for name, text in (("accounts", f"alice:{SECRET}\n"), ("own", f"{THEIRS}\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    chap = ["--chap-accounts", tmp_path / "accounts", "--chap-user", "bob"]
    words = [*chap, "--chap-secret-file", tmp_path / "own", "--lun", f"{tmp_path}/lun:size=4M"]
    with serving(
        "target", "--iqn", IQN, "--listen", "127.0.0.1:0", *words, log=tmp_path / "log"
    ) as server:
        port = server.url.split("/")[2].rpartition(":")[2]
        changes = {
            **CHAP,
            "node.session.auth.username_in": "bob",
            "node.session.auth.password_in": THEIRS,
            "node.conn[0].port": port,
            "node.conn[0].iscsi.HeaderDigest": "CRC32C",
        }
        put_record(nodes, IQN, "127.0.0.1", changes)
        (row,) = good_json("import", "--from", nodes)["targets"]
        (disk,) = good_json("info", row["name"])["disks"]
        assert disk["size"] == 4 << 20
        assert disk["connection"]["provider"] == "tcp"
