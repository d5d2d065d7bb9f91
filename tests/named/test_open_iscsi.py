"""open-iscsi's node records, as named LUNs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from iserblk.named.open_iscsi import Imported, read_nodes
from iserblk.options import Options
from iserblk.url import parse_url
from tests.named.node_records import put_record

DISK = "iqn.2026-11.example:disk"
SECRET, THEIRS = "hush-hush-hush", "not-a-word-more"
CHAP = {
    "node.session.auth.authmethod": "CHAP",
    "node.session.auth.username": "alice",
    "node.session.auth.password": SECRET,
}
MUTUAL = {
    **CHAP,
    "node.session.auth.username_in": "disk",
    "node.session.auth.password_in": THEIRS,
}


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    directory = tmp_path / "nodes"
    directory.mkdir()
    return directory


def only(nodes: Path) -> Imported:
    read = read_nodes(nodes)
    (found,) = read.targets
    assert read.unread == []
    for text in found.urls:
        url = parse_url(text)  # all that is made can be used
        Options.from_pairs({**found.options, **url.options}.items())
    return found


@pytest.mark.parametrize("flat", [False, True])
def test_a_record_in_which_nothing_was_set(flat: bool, nodes: Path) -> None:
    put_record(nodes, DISK, flat=flat)
    found = only(nodes)
    assert found == Imported(
        DISK, "disk", [f"iscsi://192.0.2.1:3260/{DISK}"], {"io-timeout": "120/30"}
    )


def test_what_has_a_counterpart(nodes: Path) -> None:
    changes = {
        "node.startup": "automatic",
        "iface.initiatorname": "iqn.2026-11.example:host",
        "node.session.timeo.replacement_timeout": "20",
        "node.session.cmds_max": "2048",
        "node.session.iscsi.ImmediateData": "No",
        "node.session.iscsi.InitialR2T": "Yes",
        "node.conn[0].port": "3261",
        "node.conn[0].iscsi.HeaderDigest": "CRC32C,None",
        "node.conn[0].iscsi.DataDigest": "CRC32C",
    }
    put_record(nodes, DISK, "2001:db8::1", changes)
    found = only(nodes)
    assert found.urls == [f"iscsi://[2001:db8::1]:3261/{DISK}?header-digest=crc32c,none"]
    assert found.options == {
        "initiator-name": "iqn.2026-11.example:host",
        "io-timeout": "20",
        "queue-depth": "1024",
        "immediate-data": "no",
        "unsolicited-data": "no",
        "data-digest": "crc32c",
    }
    assert found.automatic and not found.left_out


@pytest.mark.parametrize(
    ("seconds", "option"),
    [("120", "120/30"), ("25", "25"), ("-1", "forever"), ("100000", "86400/30"), ("0", None)],
)
def test_the_replacement_timeout(seconds: str, option: str | None, nodes: Path) -> None:
    key = "node.session.timeo.replacement_timeout"
    put_record(nodes, DISK, changes={key: seconds})
    found = only(nodes)
    assert found.options.get("io-timeout") == option
    assert found.left_out == ([] if option else [f"{key} = 0"])


def test_iser(nodes: Path) -> None:
    changes = {"iface.transport_name": "iser", "node.conn[0].iscsi.HeaderDigest": "CRC32C"}
    put_record(nodes, DISK, changes=changes)
    found = only(nodes)
    assert found.urls == [f"iser://192.0.2.1:3260/{DISK}"]
    assert found.left_out == [
        "node.conn[0].iscsi.HeaderDigest = CRC32C: there are no digests over iSER"
    ]


def test_what_has_none_is_named(nodes: Path) -> None:
    changes = {
        "node.conn[0].timeo.noop_out_interval": "0",
        "node.session.nr_sessions": "2",
        "iface.transport_name": "cxgb4i",
        "iface.hwaddress": "00:07:43:05:97:00",
        "node.of_the_future": "7",
    }
    put_record(nodes, DISK, changes=changes)
    found = only(nodes)
    assert found.urls == [f"iscsi://192.0.2.1:3260/{DISK}"]
    assert sorted(found.left_out) == [
        "iface.hwaddress = 00:07:43:05:97:00",
        "iface.transport_name = cxgb4i: iserblk uses TCP, without the adapter's own iSCSI",
        "node.conn[0].timeo.noop_out_interval = 0",
        "node.of_the_future = 7",
        "node.session.nr_sessions = 2",
    ]


def test_chap(nodes: Path) -> None:
    put_record(nodes, DISK, changes=MUTUAL)
    found = only(nodes)
    assert found.urls == [f"iscsi://alice@192.0.2.1:3260/{DISK}"]
    assert [each.reveal() for each in found.secrets] == [SECRET, THEIRS]
    assert found.options == {"io-timeout": "120/30", "target-user": "disk"}
    for secret in (SECRET, THEIRS):
        assert secret not in repr(found)
    assert found.left_out == []


@pytest.mark.parametrize(
    ("algorithms", "auth"),
    [("MD5", None), ("SHA256", "sha256"), ("SHA3-256", "sha3-256"), ("SHA3-256,SHA1,MD5", None)],
)
def test_the_algorithms_of_chap(algorithms: str, auth: str | None, nodes: Path) -> None:
    """MD5 alone is what open-iscsi has by itself: it stands for no wish to have no better one."""
    put_record(nodes, DISK, changes={**CHAP, "node.session.auth.chap_algs": algorithms})
    found = only(nodes)
    assert found.options.get("auth") == auth
    assert found.left_out == []


def test_secrets_that_are_not_in_use(nodes: Path) -> None:
    put_record(nodes, DISK, changes={**CHAP, "node.session.auth.authmethod": "None"})
    found = only(nodes)
    assert (found.urls, found.secrets) == ([f"iscsi://192.0.2.1:3260/{DISK}"], [])
    assert found.left_out == [
        "node.session.auth.username = alice: CHAP is not in use there",
        "node.session.auth.password = (not shown): CHAP is not in use there",
    ]


def test_several_portals(nodes: Path) -> None:
    put_record(nodes, DISK)
    put_record(nodes, DISK, "192.0.2.2", {"node.session.timeo.replacement_timeout": "60"})
    second = {"iface.iscsi_ifacename": "eth1", "iface.net_ifacename": "eth1"}
    put_record(nodes, DISK, "192.0.2.2", second)
    put_record(nodes, DISK, "fe80::1%eth0")
    found = only(nodes)
    assert found.urls == [
        f"iscsi://192.0.2.1:3260/{DISK}?io-timeout=120/30",
        f"iscsi://192.0.2.2:3260/{DISK}?io-timeout=60/30",
    ]
    assert found.options == {}
    assert found.left_out == [
        "192.0.2.2:3260: a second record, for the interface eth1",
        "[fe80::1%eth0]:3260: a link-local address: use another one of the target",
    ]


def test_other_secrets_at_another_portal(nodes: Path) -> None:
    put_record(nodes, DISK, changes=CHAP)
    put_record(nodes, DISK, "192.0.2.2", {**CHAP, "node.session.auth.password": THEIRS})
    found = only(nodes)
    assert found.urls == [f"iscsi://alice@192.0.2.1:3260/{DISK}"]
    assert found.left_out == ["192.0.2.2:3260: other CHAP secrets than at the first portal"]


def test_nothing_that_a_url_could_say(nodes: Path) -> None:
    put_record(nodes, DISK, changes={**CHAP, "node.session.auth.username": "al%ice"})
    found = only(nodes)
    assert found.urls == []
    assert "the user's name has a character" in found.left_out[0]


def test_names(nodes: Path) -> None:
    for target in (DISK, "iqn.2026-12.example:disk", "eui.02004567A425678D", f"{DISK}:nbd0"):
        put_record(nodes, target)
    assert [(each.target, each.name) for each in read_nodes(nodes).targets] == [
        ("eui.02004567A425678D", "eui.02004567A425678D"),
        (DISK, "disk"),
        (f"{DISK}:nbd0", "lun-nbd0"),
        ("iqn.2026-12.example:disk", "disk-2"),
    ]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "node.name = x\n", "no equals sign\n"])
def test_a_file_that_is_no_record(text: str, nodes: Path) -> None:
    put_record(nodes, DISK).write_text(text)
    with pytest.raises(BadArgument, match=r"default: no node record of open-iscsi"):
        read_nodes(nodes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, None) for name in (".default.swp", "default~", "#default#", "default.dpkg-old")),
        *(("iface0", text) for text in (b"", b"b0VIM 8.2\0\xff\xfe", b"#node.name = x\n", b"a\n")),
        ("iface0", "a directory"),
    ],
)
def test_what_is_no_record_does_not_hide_the_others(name: str, text: object, nodes: Path) -> None:
    """A directory in place of a file, bytes, a copy that an editor has left (None: of the record):
    each is named, and counts for nothing."""
    for number in range(3):
        put_record(nodes, f"{DISK}:{number}")
    record = put_record(nodes, f"{DISK}:1")
    odd = record.with_name(name)
    if text is None:
        odd.write_bytes(record.read_bytes())
    elif isinstance(text, bytes):
        odd.write_bytes(text)
    else:
        odd.mkdir()
    read = read_nodes(nodes)
    assert [each.target for each in read.targets] == [f"{DISK}:{number}" for number in range(3)]
    assert all(each.urls and not each.left_out for each in read.targets)
    (unread,) = read.unread
    assert unread.target == f"{DISK}:1"
    assert unread.words.startswith(f"{odd}: ")
    assert "\n" not in unread.words


def test_what_a_terminal_would_act_on_is_not_shown(nodes: Path) -> None:
    """Names and addresses of targets have come from the network."""
    put_record(nodes, DISK, changes={"node.\x1b[31mkey": "\x9b7m"})
    put_record(nodes, f"{DISK}:\x1b[2J")
    put_record(nodes, f"{DISK}:other", changes={"node.conn[0].address": "\x1b[33mhost"})
    read = read_nodes(nodes)
    found, other = read.targets
    assert found.left_out == [r"node.\x1b[31mkey = \x9b7m"]
    assert not other.urls and r"\x1b[33mhost" in other.left_out[-1]
    (unread,) = read.unread
    assert r"disk:\x1b[2J" in unread.words
    assert all(each.isprintable() for each in (unread.words, *other.left_out))


def test_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"No such file or directory; --from names another"):
        read_nodes(tmp_path / "nodes")
    read = read_nodes(tmp_path)
    assert (read.targets, read.unread) == ([], [])


def test_open_iscsi_reads_the_records_too(tmp_path: Path) -> None:
    """The records of these tests are such that iscsiadm, where there is one, shows them."""
    if shutil.which("iscsiadm") is None or not Path("/etc/iscsi").is_dir():
        pytest.skip("open-iscsi is not installed")
    nodes = Path("/etc/iscsi/nodes")
    target = "iqn.2026-11.example:iserblk-test"
    made = nodes / target
    put_record(nodes, target, changes=MUTUAL)
    try:
        done = subprocess.run(
            ["iscsiadm", "-m", "node", "-T", target, "-S"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "node.session.auth.username = alice" in done.stdout
        assert f"node.session.auth.password = {SECRET}" in done.stdout
    finally:
        shutil.rmtree(made)
