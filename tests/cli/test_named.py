"""Named LUNs: add, list, show and remove; and their names in place of URLs, in every command."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import bad, good, good_json, iserblk, serving
from tests.cli.runs import documented
from tests.cli.test_units import helper
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need
from tests.support.target import IQN, TargetProcess

URL = "iser://host/iqn.2026-11.example:disk/0"
SECRET, THEIRS = "hush-hush-hush", "not-a-word-more"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of named LUNs, for this process and the commands that it runs."""
    path = tmp_path / "named"
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(path))
    for name in ("USERNAME", "PASSWORD", "TARGET_USERNAME", "TARGET_PASSWORD"):
        monkeypatch.delenv(f"LIBISCSI_CHAP_{name}", raising=False)
    return path


def lines(directory: Path, name: str = "disk") -> list[str]:
    return (directory / f"{name}.conf").read_text().splitlines()


def test_added_shown_and_removed(directory: Path) -> None:
    assert good("list") == f"no LUN has a name in {directory}\n"
    said = good(
        *("add", "disk", URL, "iscsi://other/iqn.2026-11.example:disk/0", "--device", "/dev/nbd3"),
        *("--io-timeout", "60", "-o", "shared=yes,queue_depth=8"),
    )
    assert said == f"disk is in {directory}/disk.conf\n"
    assert lines(directory) == [
        f"URL={URL} iscsi://other/iqn.2026-11.example:disk/0",
        "DEVICE=/dev/nbd3",
        "OPTIONS=shared=yes,queue-depth=8,io-timeout=60",
    ]
    (row,) = good("list").splitlines()
    assert row.split() == [
        *("disk", "/dev/nbd3", "iser://host:3260/iqn.2026-11.example:disk/0"),
        "iscsi://other:3260/iqn.2026-11.example:disk/0",
    ]
    shown = good("show", "disk").splitlines()
    assert shown[0] == f"disk: {directory}/disk.conf"
    assert [line.split() for line in shown[1:]] == [
        ["URL", "iser://host:3260/iqn.2026-11.example:disk/0"],
        ["URL", "iscsi://other:3260/iqn.2026-11.example:disk/0"],
        ["device", "/dev/nbd3"],
        *[["option", word] for word in ("shared=yes", "queue-depth=8", "io-timeout=60")],
    ]
    assert "already" in bad(7, "add", "disk", URL)
    assert good("add", "disk", URL, "--replace", "--mountpoint", "/mnt/a b", "-o", "ro,uid=5")
    assert lines(directory) == [f"URL={URL}", "MOUNTPOINT=/mnt/a b", "OPTIONS=ro,uid=5"]
    assert good("remove", "disk") == f"removed {directory}/disk.conf\n"
    assert os.listdir(directory) == []
    assert "there is no LUN named disk" in bad(7, "show", "disk")


def test_json(directory: Path) -> None:
    good("add", "disk", f"{URL}?shared=yes", "--mountpoint", "/mnt", "--journal", "off")
    (directory / "wrong.conf").write_text("nonsense")
    done = iserblk("list", "--json")
    assert done.returncode == 1
    disk, wrong = json.loads(done.stdout)["luns"]
    assert disk == {
        "name": "disk",
        "file": str(directory / "disk.conf"),
        "urls": ["iser://host:3260/iqn.2026-11.example:disk/0?shared=yes"],
        "devices": [],
        "mountpoint": "/mnt",
        "options": ["journal=off"],
        "users": [],
        "in_use": [],
        "error": "",
    }
    assert wrong["name"] == "wrong" and "line 1 is not NAME=VALUE" in wrong["error"]
    shown = good_json("show", "disk")
    assert set(disk) | {"luns"} == documented("list")
    del disk["in_use"]
    assert shown == {**disk, "enabled": None, "active": None}
    assert set(shown) == set(disk) | documented("show")
    text = iserblk("list").stdout
    assert "wrong  " in text and "cannot be used" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nbd0 {}", "cannot be the name of a LUN"),
        ("a/b {}", "cannot be the name of a LUN"),
        ("disk other", "'other' is no URL, and a named LUN is made of URLs"),
        ("disk iser://host", "names no target"),
        ("disk {} {}", "given twice"),
        ("disk {}?isid=80a1b2c3d4e5", "isid"),
        ("disk {} -o isid=80a1b2c3d4e5", "isid"),
        ("disk {} -o target_password=hush", "cannot be kept"),
        ("disk {} -o colour=blue", "unknown option"),
        ("disk {} -o colour", "unknown option"),
        ("disk {} --io-timeout 0", "io-timeout"),
        ("disk {} --device sda", "name a device"),
        ("disk {} --device /dev/nbd0 --mountpoint /mnt", "give one of them"),
        ("disk {} --device /dev/nbd0 -o ro", "attach has no such option"),
        ("disk {} --mountpoint mnt", "give a full path"),
        ("disk {} --metrics /a,b", "a comma cannot stand"),
        ("disk {} --rcap iwarp --header-digest crc32c", "No such option"),
        ("disk iser://user@host/iqn.2026-11.example:disk", "a user is given without a secret"),
        ("disk {} --chap-secret-file /nonexistent", "No such file"),
    ],
)
def test_what_add_refuses(words: str, said: str, directory: Path) -> None:
    line = bad(7, "add", *words.replace("{}", URL).split())
    assert said in line
    assert "hush" not in line
    assert not directory.exists()


def test_what_add_finds_not_supported(directory: Path) -> None:
    assert "no iSCSI digests over iSER" in bad(27, "add", "disk", f"{URL}?header-digest=crc32c")
    assert not directory.exists()


def test_where_nothing_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", "here")
    assert "ISERBLK_CONFIG_DIR: give a full path" in bad(7, "add", "disk", URL)


# --- secrets -----------------------------------------------------------------------------------


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n{THEIRS}\n")
    path.chmod(0o600)
    return path


def nothing_is_told(directory: Path) -> None:
    """No command shows a secret of ``disk``, and only the owner can read it."""
    shown = "".join(
        [*(good(*words) for words in (("list",), ("show", "disk"))), json.dumps(good_json("list"))]
    )
    shown += json.dumps(good_json("show", "disk"))
    for secret in (SECRET, THEIRS):
        assert secret not in shown
    assert "alice" in shown
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mark", ["%", ":"])
def test_a_secret_in_a_url_gets_a_file_of_its_own(mark: str, directory: Path) -> None:
    query = f"?target_user=bob&target_password={THEIRS}"
    url = f"iser://alice{mark}{SECRET}@host/iqn.2026-11.example:disk/0{query}"
    good("add", "disk", url)
    assert lines(directory) == [
        "URL=iser://alice@host/iqn.2026-11.example:disk/0?target-user=bob",
        f"OPTIONS=chap-secret-file={directory}/disk.chap",
    ]
    assert (directory / "disk.chap").read_text() == f"{SECRET}\n{THEIRS}\n"
    nothing_is_told(directory)
    good("remove", "disk")
    assert os.listdir(directory) == []


def test_a_secret_in_the_environment(directory: Path) -> None:
    done = iserblk(
        *("add", "disk", URL),
        LIBISCSI_CHAP_USERNAME="alice",
        LIBISCSI_CHAP_PASSWORD=SECRET,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert lines(directory)[0] == "URL=iser://alice@host/iqn.2026-11.example:disk/0"
    assert (directory / "disk.chap").read_text() == f"{SECRET}\n"
    nothing_is_told(directory)


def test_a_file_of_a_secret_stays_where_it_is(directory: Path, secret_file: Path) -> None:
    good(
        "add",
        "disk",
        "iser://alice@host/iqn.2026-11.example:disk",
        "--chap-secret-file",
        secret_file,
    )
    assert lines(directory)[1] == f"OPTIONS=chap-secret-file={secret_file}"
    assert os.listdir(directory) == ["disk.conf"]
    nothing_is_told(directory)
    good("remove", "disk")
    assert secret_file.exists()


def test_a_credential_of_the_unit(directory: Path) -> None:
    """It does not exist where `add` runs."""
    name = "iserblk-disk.chap"
    good(
        "add",
        "disk",
        "iser://alice@host/iqn.2026-11.example:disk",
        "--chap-secret-credential",
        name,
    )
    assert lines(directory)[1] == f"OPTIONS=chap-secret-credential={name}"


def test_several_secrets_are_refused(directory: Path) -> None:
    urls = [f"iser://alice%{word}@{word[0]}/iqn.2026-11.example:disk" for word in (SECRET, THEIRS)]
    line = bad(7, "add", "disk", *urls)
    assert "different CHAP secrets" in line
    assert SECRET not in line and THEIRS not in line
    assert not directory.exists()


def test_a_file_with_a_secret_that_others_can_read(directory: Path) -> None:
    directory.mkdir()
    path = directory / "disk.conf"
    text = f"URL=iser://alice%{SECRET}@host/iqn.2026-11.example:disk/0?target_password={THEIRS}\n"
    path.write_text(f"{text}OPTIONS=target_password={THEIRS}\n")
    path.chmod(0o644)
    for words in (["info", "disk"], ["show", "disk"], ["remove", "disk"]):
        line = bad(7, *words)
        assert "others can read it, and it has a secret" in line
        assert SECRET not in line
    path.chmod(0o600)
    nothing_is_told(directory)
    assert good("show", "disk").count("=***") == 2
    path.write_text(text.replace("disk/0", "disk/far"))  # an error in the URL shows nothing, too
    for words in (["info", "disk"], ["show", "disk"]):
        line = bad(7, *words)
        assert SECRET not in line and THEIRS not in line
    done = iserblk("list")
    assert done.returncode == 1
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "text", "name", "words"),
    [
        ("b.conf", "b0VIM\n", "b", "line 1 is not NAME=VALUE"),
        ("b.conf", "", "b", "it has no URL"),
        ("b.conf", "URL=nonsense\n", "b", "it has no scheme"),
        ("my disk.conf", "URL=iser://host/iqn.2026-11.example:b/0\n", "my disk", "cannot be the"),
        (os.fsdecode(b"\xff.conf"), "", "\\udcff", "cannot be the name of a LUN"),
    ],
)
def test_one_bad_file_does_not_hide_the_others(
    file: str, text: str, name: str, words: str, directory: Path
) -> None:
    """`list` has a row for it, names it on stderr, and ends with status 1."""
    for good_one in ("a", "c"):
        good("add", good_one, f"iser://host/iqn.2026-11.example:{good_one}/0")
    (directory / file).write_text(text)
    (directory / ".a.conf.swp").write_bytes(b"b0VIM\0")
    (directory / "a.conf~").write_text("")
    done = iserblk("list")
    assert done.returncode == 1
    rows = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    assert set(rows) == {"a", "c", name}
    assert "cannot be used" in rows[name] and words in rows[name]
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"iserblk: cannot be used: {name}: ") and words in line
    done = iserblk("list", "--json")
    assert done.returncode == 1
    luns = {each["name"]: each["error"] for each in json.loads(done.stdout)["luns"]}
    assert words in luns.pop(name) and luns == {"a": "", "c": ""}


# --- names in place of URLs ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    """A target of CHAP; LUN 0 has 4 MiB."""
    files = tmp_path_factory.mktemp("accounts")
    (files / "accounts").write_text(f"alice:{SECRET}\n")
    (files / "accounts").chmod(0o600)
    words = [f"{files}/lun:size=4M", "--chap-accounts", f"{files}/accounts"]
    with serving(
        *("target", "--iqn", IQN, "--listen", "127.0.0.1:0", "--lun", *words), log=files / "log"
    ) as server:
        yield server.url  # type: ignore[misc]


def test_every_command_takes_the_name(url: str, directory: Path, tmp_path: Path) -> None:
    good("add", "disk", f"{url}/1", "--io-timeout", "20", "--shared", "yes")
    (info,) = good_json("info", "disk")["disks"]
    assert info["size"] == 4 << 20
    assert good_json("copy", "disk", tmp_path / "copy")["bytes"] == 4 << 20
    (tmp_path / "new").write_bytes(os.urandom(4 << 20))
    good("copy", tmp_path / "new", "disk", "--verify")
    good("copy", "disk", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "new").read_bytes()
    assert good_json("trim", "disk", "--length", "4096")["length"] == 4096
    assert good_json("bench", "disk", "--time", "0.1", "--depth", "1")["iops"] > 0
    portals = [each["portals"][0]["url"] for each in good_json("discover", "disk")["targets"]]
    assert portals[0].endswith(IQN)
    assert good_json("doctor", "disk")["portal"]["works"]
    with serving("nbd", "disk", "--socket", tmp_path / "socket", log=tmp_path / "log") as server:
        assert server.url.startswith("nbd+unix://")


def test_the_command_overrides_the_options_of_the_name(url: str) -> None:
    good("add", "disk", f"{url}/0", "--portals", "isns://127.0.0.1:1")
    assert "isns" in iserblk("info", "disk").stderr
    assert good("info", "disk", "--portals", "given")


def test_chap(accounts: str, directory: Path) -> None:
    scheme, _, rest = accounts.partition("://")
    good("add", "disk", f"{scheme}://alice%{SECRET}@{rest}/0")
    assert good_json("info", "disk")["disks"][0]["size"] == 4 << 20
    (directory / "disk.chap").write_text(f"{THEIRS}\n")
    bad(24, "info", "disk")


def test_mounted_by_name(url: str, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    good("add", "disk", f"{url}/1", "--mountpoint", place, "-o", "ro")
    good("mount", "disk")
    try:
        assert (place / "lun1").stat().st_size == 4 << 20
        with pytest.raises(OSError, match="Read-only"):
            (place / "lun1").open("r+b").close()
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        assert [line.split()[0] for line in mounts if str(place) in line] == ["disk"]
    finally:
        good("umount", "disk")
    assert os.listdir(place) == []
    good("add", "other", f"{url}/1")
    assert "has no mount point of its own" in bad(1, "mount", "other")
    assert "has no mount point of its own" in bad(1, "umount", "other")
    done = helper("other", place, "-o", "rw")
    assert (done.returncode, done.stderr) == (0, "")  # what mount(8) runs for a line of fstab
    assert f"it is mounted at {place}: `iserblk umount {place}`" in bad(1, "umount", "other")
    good("umount", place)


def test_what_is_read_only_is_not_written_to(url: str, tmp_path: Path) -> None:
    good("add", "disk", f"{url}/0", "-o", "ro")
    (tmp_path / "file").write_bytes(bytes(512))
    for words in (
        ["trim", "disk", "--all"],
        ["copy", tmp_path / "file", "disk"],
        ["bench", "disk", "--rw", "write", "--destroy"],
    ):
        assert "has the option ro" in bad(13, *words)
    assert "attach has no such option" in bad(7, "attach", "disk")
    good("copy", "disk", tmp_path / "all")


def test_a_gateway_to_a_name(url: str, tmp_path: Path) -> None:
    good("add", "disk", f"{url}/1", "--io-timeout", "20")
    start = ("target", "--listen", "127.0.0.1:0", "--iqn", "iqn.2026-11.example:gate")
    luns = ("--lun", f"{tmp_path}/own:size=1M", "--lun", "disk:ro")
    with serving(*start, *luns, log=tmp_path / "log") as gate:
        own, disk = good_json("info", gate.url)["disks"]
        assert (own["size"], disk["size"], disk["read_only"]) == (1 << 20, 4 << 20, True)
        assert disk["gateway_to"] == [IQN]
    (tmp_path / "disk").touch()
    done = iserblk(*start, "--lun", "disk", cwd=tmp_path)
    assert done.returncode == 7
    assert "write ./disk for the file" in done.stderr


def test_nbdkit_takes_the_name(url: str, tmp_path: Path) -> None:
    need("nbdkit")
    good("add", "disk", f"{url}/1")
    with serving(
        "nbd", "disk", "--nbdkit", "--socket", tmp_path / "socket", log=tmp_path / "log"
    ) as server:
        assert server.url


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("info disk", 7),
        ("nbd disk --socket {}/s", 7),
        ("attach disk", 7),
        ("mount disk {}", 1),
        ("trim disk", 7),
        ("bench disk", 7),
        ("show disk", 7),
        ("remove disk", 7),
    ],
)
def test_neither_a_name_nor_a_url(words: str, status: int, tmp_path: Path) -> None:
    need_fuse()
    line = bad(status, *words.format(tmp_path).split())
    assert "disk" in line and "`iserblk list`" in line


def test_a_file_of_the_same_name(url: str, tmp_path: Path) -> None:
    """Neither is overwritten by mistake."""
    good("add", "disk", f"{url}/0")
    (tmp_path / "disk").write_bytes(b"mine" * 128)
    done = iserblk("copy", "disk", "other", cwd=tmp_path)
    assert done.returncode == 7
    assert "write ./disk for the file" in done.stderr
    assert iserblk("copy", "./disk", "other", cwd=tmp_path).returncode == 0
    assert (tmp_path / "other").read_bytes() == b"mine" * 128


def test_attach_needs_root_for_a_name_too(url: str) -> None:
    if not os.geteuid():
        pytest.skip("this is root")
    good("add", "disk", f"{url}/0")
    assert "only root" in bad(13, "attach", "disk")
