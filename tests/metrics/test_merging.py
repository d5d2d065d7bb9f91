"""Texts of several processes as one: what gets through, and what spoils nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from iserblk.errors import RemoteProtocolError
from iserblk.metrics.exposition import expose
from iserblk.metrics.merging import Merger, escaped
from iserblk.metrics.reading import ProcessReading
from tests.metrics.test_exposition import EXAMPLE, process

TEXT = expose(lambda: EXAMPLE).decode()
LABELS = 'uid="0",where="/dev/nbd0"'
NOTHING = ProcessReading(8, "0.1.0", ())


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {(each.name, frozenset(each.labels.items())): each.value for each in found}


def merged(*texts: str) -> str:
    merger = Merger()
    for number, text in enumerate(texts):
        merger.take_untrusted(f'uid="0",where="/dev/nbd{number}"', text)
    return merger.text()


@settings(max_examples=20)
@given(process)
def test_all_of_a_text_gets_through(reading: ProcessReading) -> None:
    text = expose(lambda: reading).decode()
    more = {("uid", "0"), ("where", "/dev/nbd0")}
    wanted = {(name, labels | more): value for (name, labels), value in samples(text).items()}
    assert samples(merged(text)) == wanted


def test_families_are_together() -> None:
    """Each head is there once, and behind it the samples of all."""
    text = merged(TEXT, expose(lambda: NOTHING).decode(), TEXT)
    heads = re.findall("^# TYPE (.*) ", text, re.MULTILINE)
    assert sorted(heads) == sorted(re.findall("^# TYPE (.*) ", TEXT, re.MULTILINE))
    assert len(heads) == len(set(heads))
    family = ""
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            family = line.split()[2]
        elif not line.startswith("#"):
            assert re.match(rf"{family}(_bucket|_sum|_count)?\{{", line)
    assert {labels for name, labels in samples(text) if name == "iserblk_process_info"} == {
        frozenset({"uid": "0", "where": f"/dev/nbd{n}", "pid": pid, "version": "0.1.0"}.items())
        for n, pid in enumerate("787")
    }


def test_a_later_version_may_tell_more() -> None:
    more = f'# TYPE iserblk_news gauge\niserblk_news{{target="t",lun="0"}} 7\n{TEXT}up 1\n'
    assert merged(more) == merged(TEXT)


SIZE = 'iserblk_size_bytes{lun="0",target="t"}'


@pytest.mark.parametrize("size", ["1.2e+10", "1.2e+010"])
def test_numbers_as_newer_and_older_clients_write_them(size: str) -> None:
    """Version 0.26 of prometheus_client, and those before it."""
    key = ("iserblk_size_bytes", frozenset({"lun": "0", "target": "t"}.items()))
    where = frozenset({"uid": "0", "where": "/dev/nbd0"}.items())
    assert samples(merged(f"{SIZE} {size}\n")) == {(key[0], key[1] | where): 12e9}


@pytest.mark.parametrize(
    "line",
    [
        f"{SIZE} NaN",
        f"{SIZE} -1",
        f"{SIZE} 1e+999",
        f"{SIZE} 1_0",
        f"{SIZE} 1 1700000000000",
        f"{SIZE}",
        f"{SIZE} 1 # {{}}",
        "iserblk_size_bytes{} 1",
        'iserblk_size_bytes{lun="0"} 1',
        'iserblk_size_bytes{lun="x",target="t"} 1',
        'iserblk_size_bytes{lun="0",lun="0",target="t"} 1',
        'iserblk_size_bytes{lun="0",target="t",where="/dev/nbd9"} 1',
        'iserblk_size_bytes{lun="0",target="t",uid="0"} 1',
        'iserblk_size_bytes{lun="0",target="a"b"} 1',
        'iserblk_size_bytes{lun="0",target="\\x"} 1',
        f'iserblk_size_bytes{{lun="0",target="{"t" * 1001}"}} 1',
        f"{SIZE} 1\n{SIZE} 2",
        'iserblk_request_duration_seconds_bucket{le="x",lun="0",operation="read",target="t"} 1',
    ],
)
def test_a_text_with_a_wrong_line_adds_nothing(line: str) -> None:
    merger = Merger()
    merger.take_untrusted(LABELS, TEXT)
    before = merger.text()
    with pytest.raises(RemoteProtocolError, match="is wrong, or there twice"):
        merger.take_untrusted('uid="7",where="b"', f"{TEXT.replace('example', 'x')}{line}\n")
    assert merger.text() == before


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>", "iserblk_size_bytes 1\n"])
def test_what_is_none_of_ours(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not the metrics of iserblk"):
        merged(text)


@settings(max_examples=40)
@given(st.data())
def test_what_was_changed_spoils_nothing(data: st.DataObject) -> None:
    """Whatever a process tells: the whole can be read, and has what another one told."""
    start = data.draw(st.integers(0, len(TEXT)))
    stop = data.draw(st.integers(start, min(len(TEXT), start + 40)))
    word = data.draw(st.one_of(st.text(max_size=10), st.sampled_from(['"', "}", "\n", "\\", "{"])))
    merger = Merger()
    merger.take_untrusted(LABELS, TEXT)
    alone = samples(merger.text())
    try:
        merger.take_untrusted('uid="7",where="b"', TEXT[:start] + word + TEXT[stop:])
    except RemoteProtocolError as error:
        assert "\n" not in str(error)
        assert samples(merger.text()) == alone
        return
    found = samples(merger.text())
    assert {key: found[key] for key in alone} == alone
    others = [dict(labels) for key, labels in found.keys() - alone.keys()]
    assert all((each["uid"], each["where"]) == ("7", "b") for each in others)


@given(st.text())
def test_any_place_can_be_a_label(where: str) -> None:
    text = f'x{{where="{escaped(where)}"}} 1\n'
    ((_, labels),) = samples(text)
    assert dict(labels)["where"] == where.encode(errors="replace").decode()


def test_a_name_that_is_no_text() -> None:
    assert escaped("/mnt/\udcff") == "/mnt/?"
