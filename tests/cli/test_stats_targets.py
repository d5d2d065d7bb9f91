"""A target in ``iserblk stats``: its lines, and its object."""

from __future__ import annotations

from iserblk.cli.stats_rows import TargetRow
from iserblk.cli.stats_targets import address_words, target_json, target_lines
from iserblk.metrics.target_reading import AddressReading
from tests.cli.runs import documented
from tests.metrics.test_target_exposition import WHOLE

MIB = 1 << 20


def test_the_lines() -> None:
    found = dict(target_lines(WHOLE))
    assert found["address"] == "2001:db8::/64 5 bytes"  # the last of them
    assert found["LUN 0"] == "3 threads at its disk, 4 wait" and "LUN 1" not in found
    assert found["log lines left out"] == str(WHOLE.lines_left_out)


def test_the_address_is_not_trusted() -> None:
    assert address_words(AddressReading("\x1b[2J", 2 * MIB)) == "?[2J 2.0 MiB"


def test_the_object_has_each_number_and_is_documented() -> None:
    found = target_json(TargetRow("iqn", "/run/socket", 7, "1", 0.0, WHOLE))
    numbers = [value for name, value in found.items() if type(value) is int and name != "pid"]
    assert len(numbers) == len(set(numbers))
    assert found["luns"] == [{"lun": 0, "threads": 3, "waiting": 4},
                             {"lun": 1, "threads": 0, "waiting": 0}]  # fmt: skip
    assert found["largest_addresses"] == [
        {"address": "192.0.2.1", "memory_bytes": 7},
        {"address": "2001:db8::/64", "memory_bytes": 5},
    ]
    inner = {"lun", "threads", "waiting"}
    assert {*found, *inner} == documented("stats: a target")
