"""``iserblk info`` of a real target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import environment, good, good_json, iserblk
from tests.cli.runs import MIB, PATH_FIELDS, documented
from tests.support.profiles import card_reader
from tests.support.target import running_target


def test_info_shows_every_disk(url: str) -> None:
    lines = [" ".join(line.split()) for line in good("info", url).splitlines()]
    assert [line for line in lines if line.startswith("size")] == [
        "size 67108864 bytes (64.0 MiB)",
        "size 4194304 bytes (4.0 MiB)",
        "size 49152 bytes (48.0 KiB)",
    ]
    assert [line for line in lines if line.startswith("read-only")] == [
        "read-only no",
        "read-only no",
        "read-only yes",
    ]
    assert [line for line in lines if line.startswith("lun")] == [
        f"lun{number}: {url}/{number}" for number in range(3)
    ]
    assert "provider iwarp" in lines
    assert any(line.startswith("provider chosen because: rcap=auto") for line in lines)


def test_info_says_which_digests(url: str) -> None:
    plain = "iscsi" + url.removeprefix("iser")
    for query, name in (("", "none"), ("?data-digest=crc32c", "CRC32C")):
        shown = good("info", f"{plain}/1{query}")
        lines = [" ".join(line.split()) for line in shown.splitlines()]
        assert "header digest none" in lines and f"data digest {name}" in lines


def test_one_odd_lun_does_not_hide_the_others(tmp_path: Path) -> None:
    """It is named on stderr, and the status says that something is missing."""
    specs = [f"{tmp_path}/{number}:size=1M" for number in range(3)]
    with running_target(specs, tmp_path / "log", environment={"PROFILE": "card_reader"}) as target:
        for options in ([], ["--json"]):
            done = iserblk("info", target.url, *options)
            assert done.returncode == 1
            (line,) = done.stderr.splitlines()
            assert f"LUN {card_reader.LUN} is left out" in line and "no medium" in line
            assert "lun0" in done.stdout and "lun2" in done.stdout
            assert "lun1" not in done.stdout
        good("info", f"{target.url}/2")


def test_info_says_the_style(url: str) -> None:
    for options, style in (((), "cm"), (("--style", "stream"), "stream")):
        (disk,) = good_json("info", f"{url}/1", *options)["disks"]
        assert disk["connection"]["style"] == style
        lines = [" ".join(line.split()) for line in good("info", f"{url}/1", *options).splitlines()]
        assert f"style {style}" in lines
    assert any("chosen because: style=stream" in line for line in lines)


def test_info_shows_the_portals(url: str) -> None:
    dead = url.replace(url.partition("//")[2].partition("/")[0], "127.0.0.1:1")
    done = iserblk("info", f"{dead}/1", f"{url}/1", "--json")
    (disk,) = json.loads(done.stdout)["disks"]
    first, second = disk["paths"]
    assert set(first) == PATH_FIELDS
    assert (first["in_use"], second["in_use"]) == (False, True)
    assert "refused" in first["error"] and not second["error"]
    assert "is used: " in done.stderr
    text = iserblk("info", f"{dead}/1", f"{url}/1").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"{url.rpartition('/')[0]} in use" in lines
    assert any(line.startswith("iser://127.0.0.1:1 not in use, ") for line in lines)


def test_info_json_is_as_documented(url: str) -> None:
    info = good_json("info", f"{url}/1", "--rcap", "iwarp")
    (disk,) = info["disks"]
    assert set(disk) == documented("info")
    assert disk["paths"] == []
    assert (disk["lun"], disk["size"], disk["block_size"]) == (1, 4 * MIB, 4096)
    assert disk["provider_reason"] == "asked for with rcap"
    assert disk["connection"]["provider"] == "iwarp"


@pytest.mark.skipif(os.path.exists("/dev/infiniband"), reason="this machine has RDMA devices")
def test_without_a_device_nothing_of_verbs_is_loaded(url: str) -> None:
    script = (
        "import sys; from iserblk.cli import main\n"
        "try: main.main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "info", url],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0
    loaded = set(done.stderr.split())
    assert "iserblk.rcap.verbs" in loaded
    assert not {"pyverbs", "iserblk.rcap.verbs.connecting"} & loaded


def test_options_reach_the_connection(url: str) -> None:
    def crc(*arguments: str) -> Any:
        return good_json("info", *arguments)["disks"][0]["connection"]["mpa_crc"]

    assert crc(f"{url}/0") is True
    assert crc(f"{url}/0", "--mpa-crc", "no") is False
    assert crc(f"{url}/0?mpa-crc=yes", "--mpa-crc", "no") is True


def test_frames_between_our_ends_are_as_large_as_they_can_be(url: str) -> None:
    def largest(*arguments: str) -> Any:
        return good_json("info", *arguments)["disks"][0]["connection"]["mulpdu"]

    assert largest(f"{url}/0") == 65534
    assert largest(f"{url}/0?mpa-crc=no") == 65534
    one_segment = largest(f"{url}/0", "--mpa-frames", "1")  # the loopback device has a large MTU
    assert 1000 < one_segment < 65534
