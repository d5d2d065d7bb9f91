"""portals=discover: one URL is given, and the target tells of its other portals."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from iserblk.discovery.ranking import Candidate
from iserblk.discovery.targets import Found, find_targets
from iserblk.disk.multipath import discovering
from iserblk.iscsi.send_targets import Portal
from iserblk.options import Options
from iserblk.url import Url
from tests.cli.commands import good, good_json, serving
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.ported import ported_target
from tests.support.target import IQN

pytestmark = pytest.mark.logs(logs.ANOTHER_PORTAL, logs.LOST_POWER, logs.RECONNECTED)

DISCOVER = {"portals": "discover"}
DATA = b"found" * 4096 + bytes(128)

face = pytest.mark.parametrize("face", FACES)


def portals(paths: tuple[dict[str, object], ...]) -> list[object]:
    return [each["portal"] for each in paths]


@face
@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
async def test_the_given_portal_dies(tmp_path: Path, face: str, scheme: str) -> None:
    """A discovered portal takes over. (The given one is a proxy that the target does not know.)"""
    with ported_target(tmp_path) as ported:
        url = ported.urls(scheme)[0]
        async with one_disk(face, url, DISCOVER) as disk:
            ways = portals(disk.info.paths)
            assert len(ways) == 3 and ways[0] == url.partition("/iqn")[0]
            assert all(str(way).startswith(f"{scheme}://127.0.0.1:") for way in ways)
            await write(disk, DATA, 0)
            ported.one.refuse(by_reset=True)
            ported.one.cut()
            assert await read(disk, 0, len(DATA)) == DATA
            await write(disk, DATA[::-1], 0)
            await disk.flush()
            assert await read(disk, 0, len(DATA)) == DATA[::-1]
        async with one_disk(face, ported.urls(scheme)[1]) as disk:
            assert await read(disk, 0, len(DATA)) == DATA[::-1]


async def test_nobody_is_found_but_the_one_that_was_given(start_target: StartTarget) -> None:
    """The target names only the portal that was given: the disk has one portal, by any name."""
    target = start_target("lun:size=1M")
    for host in ("127.0.0.1", "localhost"):
        url = target.url.replace("127.0.0.1", host)
        async with one_disk("async", f"{url}/0", DISCOVER) as disk:
            assert disk.info.paths == ()


async def test_the_first_one_is_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Discovery asks the next given portal. A digest option, unknown to iSER, does not stop it."""
    with ported_target(tmp_path) as ported:
        urls = ported.urls("iscsi")
        dead = urls[0].replace(urls[0].split(":")[2].split("/")[0], "1", 1)
        options = {**DISCOVER, "header-digest": "crc32c"}
        with caplog.at_level(logging.WARNING):
            async with opened("async", dead, urls[1], options=options) as disks:
                (disk,) = disks.values()
                assert len(disk.info.paths) == 4
                assert disk.info.connection["header_digest"] == "CRC32C"
        assert "does not tell of other portals" in caplog.text


async def test_one_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A discovered portal that does not answer is left out: it would cost a wait at each outage."""

    async def more(url: Url, options: Options, probe: bool) -> Found:
        found = await find_targets(url, options, probe)
        (target,) = found.targets
        target.ways.insert(0, Candidate(Portal("127.0.0.1", 1)))
        return found

    monkeypatch.setattr(discovering, "find_targets", more)
    with ported_target(tmp_path) as ported:
        for scheme in ("iser", "iscsi"):
            with caplog.at_level(logging.WARNING):
                async with one_disk("async", ported.urls(scheme)[0], DISCOVER) as disk:
                    assert len(disk.info.paths) == 3
            assert f"{scheme}://127.0.0.1:1/" in caplog.text and "left out" in caplog.text


def test_on_the_command_line(tmp_path: Path) -> None:
    with ported_target(tmp_path) as ported:
        url = ported.urls()[1]
        (found,) = good_json("info", url, "--portals", "discover")["disks"]
        assert [each["in_use"] for each in found["paths"]] == [True, False, False]
        assert portals(found["paths"])[0] == url.partition("/iqn")[0]
        good("trim", f"{url}?portals=discover", "--length", "64k")


def test_with_chap(tmp_path: Path) -> None:
    """The target asks for it in discovery, too."""
    accounts, secret = tmp_path / "accounts", tmp_path / "secret"
    for file, text in ((accounts, "host:hush-hush-hush"), (secret, "hush-hush-hush")):
        file.write_text(f"{text}\n")
        file.chmod(0o600)
    arguments = ["target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M"]
    arguments += ["--listen", "127.0.0.1:0,1", "--listen", "127.0.0.1:0,2"]
    with serving(*arguments, "--chap-accounts", accounts, log=tmp_path / "log") as server:
        url = server.url.replace("//", "//host@", 1) + "/0?portals=discover"
        (found,) = good_json("info", url, "--chap-secret-file", secret)["disks"]
        assert len(found["paths"]) == 2
