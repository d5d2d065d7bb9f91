"""``iserblk target``: readiness, an orderly end, and errors of its files."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from iserblk.cli.target import command as target_command
from iserblk.iscsi import pdu
from iserblk.iscsi.send_targets import portal_untrusted
from iserblk.iscsi.text import encode
from iserblk.limited_log import BURST
from iserblk.url import parse_place, parse_portal, parse_url
from tests.cli.commands import bad, environment, good, good_json, serving
from tests.support.target import END_S, IQN

MIB = 1 << 20


def target(*luns: object, listen: str = "127.0.0.1:0", iqn: str = IQN) -> list[object]:
    specs = [word for lun in luns for word in ("--lun", lun)]
    return ["target", "--listen", listen, "--iqn", iqn, *specs]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_life(number: int, status: int, tmp_path: Path) -> None:
    """systemd is told of the start and of the end; at the end the cache is written to the file."""
    (tmp_path / "ones").write_bytes(b"\x11" * MIB)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        spec = tmp_path / "disk:size=1M:volatile-cache=8M"
        arguments = target(spec)
        notify = str(tmp_path / "notify")
        with serving(*arguments, log=tmp_path / "log", NOTIFY_SOCKET=notify) as server:
            assert re.fullmatch(rf"iser://127\.0\.0\.1:\d+/{re.escape(IQN)}", server.url)
            assert manager.recv(100) == b"READY=1"
            good("copy", tmp_path / "ones", f"{server.url}/0")
            assert server.end(number) == status
            assert manager.recv(100) == b"STOPPING=1"
    assert (tmp_path / "disk").read_bytes() == b"\x11" * MIB
    assert (tmp_path / "log").read_text() == ""


def test_a_target_with_the_short_header(tmp_path: Path) -> None:
    """``info`` says the header, and that there was a Hello; an initiator that was told nothing of
    it fails."""
    with serving(
        *target(tmp_path / "disk:size=1M"), "--header", 12, log=tmp_path / "log"
    ) as server:
        (disk,) = good_json("info", f"{server.url}/0", "--header", "12", "--json")["disks"]
        assert (disk["connection"]["header"], disk["connection"]["hello"]) == (12, True)
        assert "iSER header" in good("info", f"{server.url}/0?header=12")
        bad(4, "info", f"{server.url}/0")
    assert (tmp_path / "log").read_text() == ""
    with serving(*target(tmp_path / "disk"), log=tmp_path / "log") as server:
        line = bad(4, "info", f"{server.url}/0", "--header", 12)
        assert "; header=12 must be told to the target, too (iserblk target --header 12)" in line


def test_the_port_unless_it_is_said() -> None:
    """3260, where the target listens, in URLs, and in addresses of targets; 860 only by name.

    proves: ISER-7143-15-1
    """
    (listen,) = [each for each in target_command.params if each.name == "listen"]
    assert listen.default == ("127.0.0.1:3260",)
    for portal, port in (("host", 3260), ("[2001:db8::1]", 3260), ("host:860", 860)):
        for scheme in ("iser", "iscsi"):
            assert parse_url(f"{scheme}://{portal}/{IQN}/0").port == port
            assert parse_place(f"{scheme}://{portal}").port == port
        assert parse_portal(portal)[1] == port
        assert portal_untrusted(f"{portal},1").port == port


# The command, where closing a LUN sends a signal or finds a full disk, as the argument says.
ENDING = """
import errno, os, signal, sys
from iserblk.cli.main import main
from iserblk.target.scsi.unit import LogicalUnit

close = LogicalUnit.close

def closing(unit):
    if sys.argv[1] == "signals":
        os.kill(os.getpid(), signal.SIGTERM)
    close(unit)
    print("closed", flush=True)
    if sys.argv[1] == "full":
        raise OSError(errno.ENOSPC, "No space left on device")

LogicalUnit.close = closing
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("signals", 143, ""),
        ("full", 1, "iserblk: a: No space left on device: what its cache held is lost\n"),
    ],
)
def test_every_lun_is_closed(what: str, status: int, said: str, tmp_path: Path) -> None:
    """Every LUN is closed, also when more signals come or the disk is full while caches are
    written."""
    words = ["-c", ENDING, what, *map(str, target("a:size=1M", "b:size=1M"))]
    server = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready ")
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=END_S)
    finally:
        server.kill()
        server.communicate()
    assert (server.returncode, out, err) == (status, "closed\nclosed\n", said)


def test_luns_are_numbered_in_order_and_keep_their_identity(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(MIB))
    (tmp_path / "b").write_bytes(bytes(2 * MIB))

    def look(*names: str) -> dict[int, tuple[str, ...]]:
        luns = [tmp_path / name for name in names]
        with serving(*target(*luns), log=tmp_path / "log") as server:
            disks = good_json("info", server.url)["disks"]
        assert [disk["lun"] for disk in disks] == list(range(len(names)))
        return {disk["size"]: (disk["serial"], *disk["identifiers"]) for disk in disks}

    first = look("a", "b")
    assert first == look("b", "a")
    assert not set(first[MIB]) & set(first[2 * MIB])


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    """A file name may be any bytes; the LUN's identity is made from them."""
    spec = tmp_path / os.fsdecode(b"disk-\xff:size=1M")
    with serving(*target(spec), log=tmp_path / "log") as server:
        (disk,) = good_json("info", server.url)["disks"]
    assert disk["size"] == MIB
    assert (tmp_path / os.fsdecode(b"disk-\xff")).stat().st_size == MIB


@pytest.mark.parametrize(
    ("spec", "status", "words"),
    [
        ("missing", 7, "size="),
        (".", 7, "directory"),
        ("empty", 7, "empty"),
        ("odd", 7, "odd"),
        ("ok:size=100", 7, "100"),
        ("ok:block=512:size=1", 7, "ok"),
        ("ok:block=1000", 7, "512 or 4096"),
        ("ok:frob=1", 7, "frob"),
        ("no/such/file:size=1M", 7, "no/such"),
    ],
)
def test_bad_files(spec: str, status: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "odd").write_bytes(bytes(1000))
    (tmp_path / "ok").write_bytes(bytes(MIB))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert words in bad(status, *target(tmp_path / spec))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "ok").stat().st_size == MIB


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "ok").write_bytes(bytes(MIB))
    lun = tmp_path / "ok"
    assert "no iSCSI name" in bad(7, *target(lun, iqn="disk"))
    assert "HOST:PORT" in bad(7, *target(lun, listen="3260"))
    for host in ("no.such.invalid", "a..b", "a" * 64):
        assert f"listen {host}:0: " in bad(7, *target(lun, listen=f"{host}:0"))
    assert "HOST:PORT" in bad(7, *target(lun, listen=f"127.0.0.1:{'9' * 5000}"))
    assert "need --chap-accounts" in bad(7, *target(lun), "--chap-user", "u")
    assert "No such file" in bad(7, *target(lun), "--chap-accounts", "no/such")
    assert "the transports are iwarp" in bad(7, *target(lun, listen="h:1,transport=x"))
    for option in ("--isns", "--slp-da"):
        for wrong in ("host:x", "isns://host", "ho st"):
            assert f"{option} {wrong!r}: give HOST[:PORT]" in bad(7, *target(lun), option, wrong)
    assert "at least one scope" in bad(7, *target(lun), "--slp-scopes", " ,")
    assert "say iwarp or verbs" in bad(7, *target(lun), "--rcap", "tcp")
    if not os.path.exists("/dev/infiniband"):
        assert "--rcap verbs: no RDMA" in bad(27, *target(lun), "--rcap", "verbs")
    with serving(*target(lun), log=tmp_path / "log") as server:
        listen = server.url.removeprefix("iser://").partition("/")[0]
        (tmp_path / "other").write_bytes(bytes(MIB))
        assert "in use" in bad(28, *target(tmp_path / "other", listen=listen))
        assert "ok" in bad(28, *target(lun))


@pytest.mark.parametrize("verbose", [False, True], ids=["", "verbose"])
def test_no_peer_fills_the_log(tmp_path: Path, verbose: bool) -> None:
    """Whatever it does again and again. The number of the lines that are left out is logged."""
    accounts = tmp_path / "accounts"
    accounts.touch(mode=0o600)
    accounts.write_text("alice:alices-secret-01\n")
    words = [*target(tmp_path / "disk:size=1M"), "--chap-accounts", accounts]
    count = 3 * BURST
    with serving(*(["-v"] if verbose else []), *words, log=tmp_path / "log") as server:
        place = parse_url(f"{server.url}/0")
        text = encode([("InitiatorName", "iqn.2026-11.example:b"), ("TargetName", IQN)])
        request = pdu.LoginRequest(
            flags=pdu.TRANSIT | pdu.OPERATIONAL_STAGE << pdu.CSG_SHIFT | pdu.FULL_FEATURE_PHASE,
            data_length=len(text),
            isid=bytes(6),
            tsih=0,
            itt=0,
            cmd_sn=1,
            exp_stat_sn=0,
        )
        for _ in range(count):
            with socket.create_connection((place.host, place.port)) as peer:
                peer.sendall(request.pack() + text + bytes(-len(text) & 3))
                peer.settimeout(30)
                while peer.recv(1 << 16):
                    pass
        server.end(signal.SIGTERM)
    lines = (tmp_path / "log").read_text().splitlines()
    refused = [line for line in lines if "login refused" in line]
    assert len(refused) == BURST + 1
    assert f"{count - BURST} more lines like this one are left out: " in refused[-1]
    assert len(lines) <= 5 * (BURST + 2)
