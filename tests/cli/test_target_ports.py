"""``iserblk target`` with several portals."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.cli.commands import bad, good, good_json, iserblk, serving
from tests.support.target import IQN
from tests.support.until import until_blocking


def test_portal_groups_and_their_states(tmp_path: Path) -> None:
    """One LUN through two portals; SendTargets tells of both; a state changes while it runs."""
    states, log = tmp_path / "states", tmp_path / "log"
    states.write_text("2 standby\n")
    arguments = ["target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M"]
    for listen in ("127.0.0.1:0", "127.0.0.1:0,2", "0.0.0.0:0,3"):
        arguments += ["--listen", listen]
    with serving(*arguments, "--access-states", states, log=log) as server:
        listen = server.url.removeprefix("iser://").partition("/")[0]
        (target,) = good_json("discover", f"iscsi://{listen}")["targets"]
        first, second = target["portals"]  # the third has no address of its own
        assert [each["group"] for each in target["portals"]] == [1, 2]
        assert f"{first['host']}:{first['port']}" == listen
        (disk,) = good_json("info", f"{first['url']}/0")["disks"]
        done = iserblk("info", f"{second['url']}/0")
        assert (done.returncode, done.stdout) == (1, "")
        assert "this path is in the standby state" in done.stderr
        # A file with an error changes nothing.
        states.write_text("2 asleep\n")
        hang_up(server.process.pid, log, "configuration is left as it is: .*'asleep'")
        assert iserblk("info", f"{second['url']}/0").returncode == 1
        states.write_text("1 unavailable\n2 non-optimized\n")
        server.process.send_signal(signal.SIGHUP)
        while iserblk("info", f"{second['url']}/0").returncode:
            assert server.process.poll() is None
        (other,) = good_json("info", f"{second['url']}/0")["disks"]
        assert other["identifiers"] == disk["identifiers"]
        assert "this path is unavailable" in iserblk("info", f"{first['url']}/0").stderr


def test_every_group_is_advertised_as_ever(tmp_path: Path) -> None:
    """A target with three portal groups: SendTargets, by iSER and by TCP, names each with its tag
    and its own portal; there the same LUN is found, whichever protocol the initiator uses.

    proves: ISER-B.2-2
    """
    arguments = ["target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M"]
    for tag in (1, 2, 4):
        arguments += ["--listen", f"127.0.0.1:0,{tag}"]
    with serving(*arguments, log=tmp_path / "log") as server:
        listen = server.url.removeprefix("iser://").partition("/")[0]
        by_iser, by_tcp = (
            good_json("discover", f"{scheme}://{listen}")["targets"] for scheme in ("iser", "iscsi")
        )
        for (target,), scheme in ((by_iser, "iser"), (by_tcp, "iscsi")):
            portals = target["portals"]
            assert [each["group"] for each in portals] == [1, 2, 4]
            assert len({each["port"] for each in portals}) == 3
            found = [
                good_json("info", f"{scheme}://{each['host']}:{each['port']}/{IQN}/0")["disks"]
                for each in portals
            ]
            (identifiers,) = {str(disk["identifiers"]) for (disk,) in found}
            assert identifiers != "[]"


def hang_up(pid: int, log: Path, words: str) -> None:
    os.kill(pid, signal.SIGHUP)
    until_blocking(lambda: re.search(words, log.read_text()))


def test_wrong_words(tmp_path: Path) -> None:
    def start(*more: object) -> str:
        return bad(7, "target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M", *more)

    assert "a portal group is a number" in start("--listen", "127.0.0.1:0,x")
    assert "No such file" in start("--listen", "127.0.0.1:0", "--access-states", tmp_path / "no")
    states = tmp_path / "states"
    states.write_text("5 standby\n")
    text = start("--listen", "127.0.0.1:0,4", "--access-states", states)
    assert "there is no portal group 5; the groups are: 4" in text


def test_help_says_so() -> None:
    assert "HOST:PORT[,GROUP]" in good("target", "--help")


def test_the_wrong_protocol_for_a_group(tmp_path: Path) -> None:
    """One line that says which protocol the portal takes."""
    start = ["target", "--iqn", IQN, "--lun"]
    only_iser = [*start, f"{tmp_path}/a:size=1M", "--listen", "127.0.0.1:0,transport=iwarp"]
    with serving(*only_iser, log=tmp_path / "log") as server:
        line = bad(5, "info", server.url.replace("iser:", "iscsi:"))
        assert f"perhaps iSER alone: then write {server.url} in place of iscsi://" in line
    only_tcp = [*start, f"{tmp_path}/b:size=1M", "--listen", "127.0.0.1:0,transport=tcp"]
    with serving(*only_tcp, log=tmp_path / "log") as server:
        assert server.url.startswith("iscsi://")
        line = bad(4, "info", server.url.replace("iscsi:", "iser:"))
        right = f"write {server.url} in place of iser://"
        assert f"rejected the connection; the portal speaks Traditional iSCSI: {right}" in line
