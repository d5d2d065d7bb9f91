"""Text data segments: key=value pairs, whole and in parts; SendTargets."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.text import (
    MAXIMUM_PAIRS,
    MAXIMUM_TEXT,
    Collector,
    decode_untrusted,
    encode,
)
from tests.iscsi import captured
from tests.iscsi.texts import KEYS, VALUES


@given(st.dictionaries(KEYS, VALUES, max_size=20))
def test_round_trip(pairs: dict[str, str]) -> None:
    assert dict(decode_untrusted(encode(pairs.items()))) == pairs


@pytest.mark.parametrize(
    ("data", "pairs"),
    [
        (b"", []),
        (b"A=\0", [("A", "")]),
        (b"A=b=c\0", [("A", "b=c")]),  # the first = ends the key
        (b"A=b", [("A", "b")]),  # without its NUL
        (b"\0A=b\0\0\0", [("A", "b")]),  # padding counted as data
        ("A=Größe\0".encode(), [("A", "Größe")]),  # an iSCSI-local-name-value
        (b"X#NodeArchitecture=x/1\0", [("X#NodeArchitecture", "x/1")]),
        (b"iSERHelloRequired=No\0", [("iSERHelloRequired", "No")]),
        (
            b"TargetAddress=a\0TargetAddress=b\0",  # section 11.13.5: one address or more
            [("TargetAddress", "a"), ("TargetAddress", "b")],
        ),
    ],
)
def test_decode(data: bytes, pairs: list[tuple[str, str]]) -> None:
    assert decode_untrusted(data) == pairs
    assert decode_untrusted(memoryview(data)) == pairs


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"A\0", "no key=value"),
        (b"=b\0", "no key=value"),
        (b"A b=c\0", "no key=value"),
        (b"A" * 64 + b"=c\0", "no key=value"),
        (b"\xc3\xa4=c\0", "UTF-8"),
        (b"A=\xff\0", "UTF-8"),
        (b"A=1\0A=1\0", "A was given twice"),
        (b"A=" + b"x" * 8193 + b"\0", "8193"),
        (b"\0" * (MAXIMUM_TEXT + 1), "bytes"),
        (b"".join(b"K%d=\0" % i for i in range(MAXIMUM_PAIRS + 1)), "256 keys"),
    ],
)
def test_refused(data: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode_untrusted(data)


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        pairs = decode_untrusted(data)
        assert decode_untrusted(encode(pairs)) == pairs


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=5))
def test_parts_are_the_whole(data: bytes, cuts: list[int]) -> None:
    """The C bit may cut a text anywhere, inside of a character, too."""
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    collector = Collector()
    for start, end in itertools.pairwise(places):
        collector.add(data[start:end])
    try:
        whole = decode_untrusted(data)
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError):
            collector.take()
    else:
        assert collector.take() == whole
    assert collector.take() == []  # the next one begins empty


def test_parts_are_bounded() -> None:
    collector = Collector()
    for _ in range(MAXIMUM_TEXT // 8192):
        collector.add(bytes(8192))
    with pytest.raises(RemoteProtocolError, match="65536"):
        collector.add(b"\0")


@pytest.mark.parametrize(
    "name", [captured.LIO_LOGIN, captured.LIO_DISCOVERY, captured.KERNEL_LOGIN]
)
@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_captured_texts(name: str, direction: str) -> None:
    """The texts of real peers decode, and encode to the same bytes."""
    ((_, data),) = captured.pdus(f"{name}.{direction}.bin")
    pairs = decode_untrusted(data)
    assert len(pairs) >= 17
    assert encode(pairs) == data


def test_a_look_at_a_text_changes_nothing() -> None:
    collector = Collector()
    collector.add(b"A=1\0B=")
    assert collector.look(b"2\0") == [("A", "1"), ("B", "2")]
    with pytest.raises(RemoteProtocolError):
        collector.look(bytes(MAXIMUM_TEXT))
    collector.add(b"3\0")
    assert collector.take() == [("A", "1"), ("B", "3")]
