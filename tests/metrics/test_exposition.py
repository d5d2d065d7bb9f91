"""Prometheus text: what is told comes back; what is not ours is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from subprocess import PIPE

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.metrics.counting import OPERATIONS
from iserblk.metrics.exposition import expose, parse_untrusted
from iserblk.metrics.reading import (
    BOUNDS_US,
    ConnectionReading,
    LunReading,
    OperationReading,
    PathReading,
    ProcessReading,
)
from iserblk.metrics.target_reading import (
    AddressReading,
    SessionReading,
    TargetLunReading,
    TargetReading,
)
from tests.support.target import ROOT

counts = st.integers(0, 2**50)
text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
operation = st.builds(
    OperationReading,
    buckets=st.tuples(*[st.integers(0, 2**40)] * (len(BOUNDS_US) + 1)),
    bytes=counts,
    errors=counts,
    seconds=st.integers(0, 10**15).map(lambda nanoseconds: nanoseconds / 1e9),
)
connection = st.builds(
    ConnectionReading,
    cid=st.integers(0, 65535),
    portal=text,
    provider=text,
    in_flight=counts,
    commands=counts,
    bytes=counts,
)
path = st.builds(
    PathReading,
    index=st.integers(0, 9999),
    portal=text,
    in_use=st.booleans(),
    failures=counts,
    state=st.none() | st.integers(0, 15),
)
lun = st.builds(
    LunReading,
    target=text,
    lun=st.integers(0, 16383),
    name=text,
    url=text,
    size=counts,
    portal=text,
    provider=text,
    connected=st.booleans(),
    in_flight=counts,
    retries=counts,
    reconnects=counts,
    replayed=counts,
    aborted=counts,
    resets=counts,
    connections=counts,
    wanted=counts,
    recovered=counts,
    reassigned=counts,
    snacks=counts,
    damaged=counts,
    per_connection=st.lists(connection, max_size=3, unique_by=lambda each: each.cid).map(tuple),
    paths=st.lists(path, max_size=3, unique_by=lambda each: each.index).map(tuple),
    unflushed=counts,
    operations=st.fixed_dictionaries(dict.fromkeys(OPERATIONS, operation)),
)
target = st.builds(
    TargetReading,
    target=text,
    url=text,
    **{each.name: counts for each in fields(TargetReading) if each.type == "int"},
    addresses=st.lists(
        st.builds(AddressReading, address=text, memory=counts),
        max_size=3,
        unique_by=lambda each: each.address,
    ).map(tuple),
    luns=st.lists(
        st.builds(TargetLunReading, lun=st.integers(0, 16383), threads=counts, waiting=counts),
        max_size=3,
        unique_by=lambda each: each.lun,
    ).map(tuple),
    named_sessions=st.lists(
        st.builds(SessionReading, initiator=text, address=text), max_size=3
    ).map(tuple),
)
process = st.builds(
    ProcessReading,
    pid=st.integers(1, 2**22),
    version=text.filter(bool),
    luns=st.lists(lun, max_size=3, unique_by=lambda each: (each.target, each.lun)).map(tuple),
    targets=st.lists(target, max_size=2, unique_by=lambda each: each.target).map(tuple),
    command=text,
    began=counts,
)


@given(process)
def test_what_is_told_comes_back(reading: ProcessReading) -> None:
    assert parse_untrusted(expose(lambda: reading, sessions=True).decode()) == reading


EXAMPLE = ProcessReading(
    7,
    "0.1.0",
    (
        LunReading(
            target="iqn.2026-11.example:disk",
            lun=0,
            name="lun0",
            url="iser://host:3260/iqn.2026-11.example:disk/0",
            size=1 << 30,
            portal="host:3260",
            provider="iwarp",
            connected=True,
            per_connection=(ConnectionReading(0, "host:3260", "iwarp"),),
            paths=(PathReading(0, "iser://host:3260", True, 0, 0),),
        ),
    ),
    (
        TargetReading(
            "iqn.2026-11.example:other",
            "iser://host:3261/iqn.2026-11.example:other",
            memory=1 << 20,
            addresses=(AddressReading("192.0.2.1", 1 << 19), AddressReading("other", 1 << 19)),
            luns=(TargetLunReading(0, 1, 0),),
        ),
    ),
)


def test_every_metric_is_documented() -> None:
    names = set(re.findall(r"^# TYPE (\S+)", expose(lambda: EXAMPLE).decode(), re.MULTILINE))
    document = (ROOT / "docs/commands/stats.md").read_text()
    assert names
    missing = [name for name in names if f"`{name}" not in document]
    assert not missing, f"docs/commands/stats.md has no row for {missing}"


def test_buckets_are_cumulative_and_in_seconds() -> None:
    lines = expose(lambda: EXAMPLE).decode().splitlines()
    bounds = [
        re.search('le="(.*?)"', line)[1]  # type: ignore[index]
        for line in lines
        if "_bucket" in line and 'operation="read"' in line
    ]
    assert bounds[:3] == ["0.000008", "0.000016", "0.000032"]
    assert bounds[-2:] == ["67.108864", "+Inf"]
    assert [float(bound) for bound in bounds[:-1]] == [bound / 1e6 for bound in BOUNDS_US]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "hello",
        "up 1",
        'iserblk_process_info{pid="x",version="1"} 1',
        "iserblk_process_info 1",
        'iserblk_size_bytes{target="t",lun="one"} 1',
        'iserblk_size_bytes{target="t",lun="0"} NaN',
        'iserblk_size_bytes{target="t",lun="0"} +Inf',
        'iserblk_size_bytes{lun="0"} 1',
        'iserblk_target_sessions{target="t"} NaN',
        "iserblk_target_sessions 1",
        'iserblk_target_lun_threads{target="t",lun="one"} 1',
        'iserblk_target_address_memory_bytes{target="t"} 1',
        'iserblk_target_info{target="t"} 1',
        'iserblk_target_session_info{target="t",session="0",address="a"} 1',
        'iserblk_start_time_seconds{command="nbd"} NaN',
        "iserblk_start_time_seconds 1",
        'iserblk_request_duration_seconds_bucket{target="t",lun="0",operation="read",le="3"} 1',
        "iserblk_request_duration_seconds_bucket"
        '{target="t",lun="0",operation="read",le="0.000008"} 5',
        "iserblk_size_bytes{",
        'iserblk_size_bytes{lun="',
    ],
)
def test_what_is_not_ours(said: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_untrusted(said)


@given(st.text())
def test_any_text(said: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_untrusted(said)


@given(st.data())
def test_text_that_was_changed(data: st.DataObject) -> None:
    whole = expose(lambda: EXAMPLE).decode()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 40)))
    try:
        parse_untrusted(whole[:start] + data.draw(st.text(max_size=10)) + whole[stop:])
    except RemoteProtocolError as error:
        assert "\n" not in str(error)


def test_more_than_is_known() -> None:
    """A later version may tell more."""
    more = expose(lambda: EXAMPLE).decode() + (
        'iserblk_news{target="iqn.2026-11.example:disk",lun="0"} 7\n'
        'iserblk_target_news{target="iqn.2026-11.example:other",lun="0"} 7\n'
        'iserblk_request_bytes_total{target="iqn.2026-11.example:disk",lun="0",operation="x"} 7\n'
        "process_cpu_seconds_total 7\n"
    )
    assert parse_untrusted(more) == EXAMPLE


def test_nothing_of_this_is_loaded_for_a_disk() -> None:
    """Start-up must not wait for these imports; see serving._exposition."""
    script = "import sys, iserblk.disk.blocking, iserblk.disk.aio; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], stdout=PIPE, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "iserblk.metrics.serving" in loaded
    assert not {"prometheus_client", "iserblk.metrics.exposition"} & loaded
