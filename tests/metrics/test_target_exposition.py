"""Metrics of targets: what they are called, and that peers add no labels."""

from __future__ import annotations

import re
from dataclasses import fields, replace

from iserblk.metrics.exposition import expose, parse_untrusted
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.target_exposition import PREFIX
from iserblk.metrics.target_reading import (
    AddressReading,
    SessionReading,
    TargetLunReading,
    TargetReading,
)

NUMBERS = [each.name for each in fields(TargetReading) if each.type == "int"]
WHOLE = TargetReading(
    "iqn.2026-11.example:disk",
    "iser://host/iqn.2026-11.example:disk",
    **{name: number for number, name in enumerate(NUMBERS, 100)},
    addresses=(AddressReading("192.0.2.1", 7), AddressReading("2001:db8::/64", 5)),
    luns=(TargetLunReading(0, 3, 4), TargetLunReading(1, 0, 0)),
    named_sessions=(),
)
SESSIONS = (SessionReading("iqn.2026-11.example:host", "192.0.2.1"), SessionReading('a"\n\\', ""))


def text(*targets: TargetReading, sessions: bool = False) -> str:
    return expose(lambda: ProcessReading(1, "1", (), targets), sessions).decode()


def test_each_field_has_a_metric_of_its_own() -> None:
    reading = parse_untrusted(text(WHOLE))
    assert reading == ProcessReading(1, "1", (), (WHOLE,))


def test_labels() -> None:
    """Peers choose none, but addresses, which are few."""
    found = text(WHOLE)
    samples = re.findall(r"^iserblk_target_.*", found, re.MULTILINE)
    labels = {tuple(re.findall(r'(\w+)="', each)) for each in samples}
    assert labels == {("target",), ("target", "url"), ("address", "target"), ("lun", "target")}
    others = re.sub(r"^(# \w+ )?iserblk_target_.*\n", "", found, flags=re.MULTILINE)
    assert len(others.splitlines()) == 6  # of iserblk_process_info and iserblk_start_time_seconds


def test_sessions_are_told_to_those_who_ask_for_them() -> None:
    """Their peers choose the names: in each scrape others, without end."""
    having = replace(WHOLE, named_sessions=SESSIONS)
    assert text(having) == text(WHOLE)
    assert parse_untrusted(text(having, sessions=True)).targets == (having,)


def test_a_process_without_targets_says_nothing_of_them() -> None:
    assert PREFIX not in text()


def test_several_targets() -> None:
    other = replace(WHOLE, target="iqn.2026-11.example:other", addresses=(), luns=())
    assert parse_untrusted(text(WHOLE, other)).targets == (WHOLE, other)


def test_what_a_later_version_tells_is_left_out() -> None:
    more = f'{PREFIX}news{{target="{WHOLE.target}",lun="7"}} 1\n'
    assert parse_untrusted(text(WHOLE) + more).targets == (WHOLE,)
