"""What the checks see of a machine: files, programs, limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.doctor.machine import MAXIMUM_BYTES, Machine
from tests.doctor.box import Box


def test_files_are_read_below_the_root(box: Box) -> None:
    box.put("sys/one", " text \n")
    assert box.machine.read("/sys/one") == box.machine.read("sys/one") == "text"
    assert box.machine.path("/sys/one") == box.root / "sys/one"


@pytest.mark.parametrize("name", ["sys/missing", "sys", "sys/one/below"])
def test_what_cannot_be_read_is_empty(box: Box, name: str) -> None:
    box.put("sys/one")
    assert box.machine.read(name) == ""


def test_bytes_that_are_no_text_do_no_harm(box: Box) -> None:
    box.put("sys/one").write_bytes(b"a\xffb")
    assert box.machine.read("sys/one") == "a\N{REPLACEMENT CHARACTER}b"


def test_no_more_is_read_than_a_limit(box: Box) -> None:
    box.put("sys/one").write_bytes(b"x" * (MAXIMUM_BYTES + 1))
    assert len(box.machine.read("sys/one")) == MAXIMUM_BYTES


def test_directories_in_order(box: Box) -> None:
    for name in ("b", "a", "c"):
        box.put(f"sys/{name}")
    assert box.machine.names("sys") == ["a", "b", "c"]
    assert box.machine.names("sys", "[ac]") == ["a", "c"]
    assert box.machine.entries("missing") == []


def test_programs_are_found_on_the_path_first(box: Box) -> None:
    box.program("usr/sbin/tool")
    assert box.machine.program("tool") == "/usr/sbin/tool"  # also one that is for root
    box.program("opt/bin/tool")
    assert box.machine.program("tool") == "/opt/bin/tool"
    box.put("usr/bin/text")
    assert box.machine.program("text") is None  # it cannot be run
    assert box.machine.program("missing") is None


def test_what_is_there_and_may_be_used(box: Box) -> None:
    box.put("dev/one")
    assert box.machine.exists("dev/one") and box.machine.may_use("dev/one")
    assert not box.machine.exists("dev/two") and not box.machine.may_use("dev/two")


def test_this_machine() -> None:
    here = Machine()
    assert here.root == Path("/") and here.release and here.memlock >= -1
    assert here.has_package("trio") and not here.has_package("no_such_package")
    assert here.program("sh") is not None
