"""What scripts/bench --lab makes of a guest's samples."""

from __future__ import annotations

import pytest
from benchlib import lab


def sample(subject: str, ios: int, job: str = "4k-randread-d32") -> dict[str, object]:
    return {
        "job": job, "subject": subject, "ios": ios, "seconds": 2.0, "bytes": ios * 4096,
        "cpu_seconds": 1.0,
    }  # fmt: skip


def test_ratios_are_taken_within_rounds() -> None:
    samples = [
        sample("iserblk-window", 100), sample("ib_iser", 200),
        sample("iserblk-window", 30), sample("ib_iser", 40),
        sample("iserblk-window", 9), sample("ib_iser", 10),
    ]  # fmt: skip
    assert lab.ratio(samples, "4k-randread-d32", "iserblk-window") == 0.75
    assert lab.ratio(samples, "4k-randread-d32", "iserblk-region") is None


def test_goals_and_failures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    lab.report(
        [
            sample("iserblk-window", 50), sample("iserblk-region", 30), sample("ib_iser", 100),
            {"job": "4k-randread-d32", "subject": "iscsi-perf", "failed": "no average"},
        ]
    )  # fmt: skip
    told = capsys.readouterr().out
    assert "4k-randread-d32, iserblk-window: ≥ 0.33 of ib_iser: met" in told
    assert "4k-randread-d32, iserblk-region: ≥ 0.33 of ib_iser: missed" in told
    assert "4k-randread-d32, iserblk-window: CPU time 2.00, ≤ 2.00 of ib_iser: met" in told
    assert "4k-randread-d32, iserblk-region: CPU time 3.33, ≤ 2.00 of ib_iser: missed" in told
    assert "failed" in told and "0.50" in told
