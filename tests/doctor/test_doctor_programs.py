"""Programs and packages that are there, or missing."""

from __future__ import annotations

import os

import pytest

from iserblk import forms
from iserblk.doctor.finding import OK, WARNING
from iserblk.doctor.programs import check_programs, data_path
from tests.doctor.box import RELEASE, Box, named


def test_nbd_devices(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put(f"lib/modules/{RELEASE}/modules.dep", "kernel/nbd.ko:\n")
    finding = named(check_programs(box.machine), "/dev/nbdX")
    assert finding.remedy == "modprobe nbd (as root)"
    box.put("sys/block/nbd0/pid", "77\n")
    box.put("sys/block/nbd0p1/dev", "43:1\n")  # a partition is no device of its own
    finding = named(check_programs(box.machine), "/dev/nbdX")
    assert (finding.status, finding.text) == (WARNING, "1 devices, 0 of them free")
    box.put("sys/block/nbd1/dev", "43:32\n")
    box.put("dev/nbd1")
    assert named(check_programs(box.machine), "/dev/nbdX").status == OK
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = named(check_programs(box.machine), "/dev/nbdX")
    assert (finding.status, finding.remedy) == (WARNING, "iserblk attach needs root")


def test_the_form_of_the_data_path(box: Box) -> None:
    expected = WARNING if forms.why_plain else OK
    assert named(check_programs(box.machine), "data path").status == expected
    assert data_path("").status == OK
    finding = data_path(forms.STALE)
    assert (finding.status, finding.remedy) == (WARNING, "run scripts/setup")
    assert "older than its sources" in finding.text
    assert data_path(forms.UNWANTED).remedy == "unset ISERBLK_PLAIN"
