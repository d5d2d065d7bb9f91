"""What the doctor makes of all that it found."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk import forms
from iserblk.doctor.finding import ERROR, OK, SKIPPED, WARNING
from iserblk.doctor.programs import check_programs
from iserblk.doctor.report import check_machine, what_works
from iserblk.initiator.connecting import verbs
from tests.doctor.box import Box, install, named
from tests.support.fabric import Fabric


def test_nothing_is_installed(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "why_plain", forms.NOT_COMPILED)
    findings = check_programs(box.machine)
    assert {finding.status for finding in findings} == {WARNING}
    assert all(finding.remedy for finding in findings)
    assert what_works(findings) == {
        "iwarp": True,
        "verbs": False,
        "nbd": True,
        "attach": False,
        "mount": False,
    }


def test_everything_is_installed(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "provider", Fabric())
    monkeypatch.setattr(forms, "why_plain", "")
    install(box)
    box.device()
    box.nodes()
    for module in ("nbd", "fuse", "rdma_cm", "ib_uverbs", "rdma_ucm"):
        box.put(f"sys/module/{module}/refcnt", "1\n")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    findings = check_machine(box.machine)
    assert {finding.status for finding in findings} <= {OK, SKIPPED}
    assert set(what_works(findings).values()) == {True}
    assert named(findings, "/dev/nbdX").text == "2 devices, 1 of them free"
    assert named(findings, "RDMA drivers").text == "libibverbs knows rxe"
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("gone", "name", "words", "broken"),
    [
        ("opt/bin/nbdkit", "nbdkit", "missing", set()),
        (
            "usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-python-plugin.so",
            "nbdkit",
            "no Python plugin",
            set(),
        ),
        ("dev/fuse", "FUSE", "/dev/fuse is missing", {"mount"}),
        ("bin/fusermount3", "FUSE", "fusermount3 is missing", {"mount"}),
        ("etc/libibverbs.d/rxe.driver", "RDMA drivers", "libibverbs has none", set()),
    ],
)
def test_what_stops_working(
    gone: str,
    name: str,
    words: str,
    broken: set[str],
    box: Box,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verbs, "provider", Fabric())
    install(box)
    (box.root / gone).unlink()
    findings = check_machine(box.machine)
    finding = named(findings, name)
    assert finding.status == WARNING and words in finding.text and finding.remedy
    assert {use for use, works in what_works(findings).items() if not works} == broken


@pytest.mark.parametrize(("device", "status"), [(True, WARNING), (False, SKIPPED)])
def test_the_word_of_the_provider(
    device: bool, status: str, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing provider is a problem only where there is a device."""
    fabric = Fabric()
    fabric.missing = "no luck with verbs"
    monkeypatch.setattr(verbs, "provider", fabric)
    if device:
        box.device()
    finding = named(check_machine(box.machine), "verbs")
    assert (finding.status, finding.text) == (status, "no luck with verbs")


def test_no_finding_of_a_machine_is_an_error(box: Box) -> None:
    """Software iWARP works anywhere."""
    assert ERROR not in {finding.status for finding in check_machine(box.machine)}
