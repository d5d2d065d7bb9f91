"""Hello and HelloReply: the bytes, what is refused, and what a target answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.datamover.hello import (
    RFC_5046,
    RFC_7145,
    Form,
    Hello,
    HelloReply,
    answer,
    check_reply_untrusted,
    greeting,
)
from iserblk.errors import RemoteProtocolError
from tests.support.golden import golden

FORMS = pytest.mark.parametrize("form", [RFC_7145, RFC_5046], ids=["28", "12"])


# shows: SYSTEM-31
@FORMS
def test_a_hello_is_as_the_specification_has_it(form: Form) -> None:
    """proves: ISER-9.3-1, ISER-9.3-2, ISER-9.3-3, ISER-9.3-4, ISER-9.3-5, ISER-7145-9.3-1"""
    data = golden(f"iser/hello-{form.length}")
    hello = greeting(form, 4)
    assert hello.pack(form.length) == data
    assert Hello.unpack_untrusted(data, form.length) == hello
    assert hello.max_version == hello.min_version == {28: 10, 12: 1}[form.length]


# shows: SYSTEM-31
@FORMS
def test_a_reply_is_as_the_specification_has_it(form: Form) -> None:
    """proves: ISER-9.4-1, ISER-9.4-2, ISER-9.4-3, ISER-9.4-4, ISER-9.4-5, ISER-7145-9.3-1"""
    data = golden(f"iser/hello-reply-{form.length}")
    reply = answer(form, greeting(form, 4), 9)
    assert reply.pack(form.length) == data
    assert HelloReply.unpack_untrusted(data, form.length) == reply


def test_a_rejection_is_one_bit() -> None:
    """proves: ISER-9.4-7, ISER-10.1.3.2-1"""
    reply = answer(RFC_7145, greeting(RFC_7145, 4), 0)
    assert reply.pack(28) == golden("iser/hello-reply-rej-28")
    assert HelloReply.unpack_untrusted(golden("iser/hello-reply-rej-28"), 28).rejected


@FORMS
def test_reserved_fields_are_ignored(form: Form) -> None:
    """proves: ISER-9.3-6, ISER-9.4-6"""
    data = bytearray(golden(f"iser/hello-{form.length}"))
    plain = Hello.unpack_untrusted(bytes(data), form.length)
    data[0] |= 0x0F
    data[4:] = b"\xff" * (form.length - 4)
    assert Hello.unpack_untrusted(bytes(data), form.length) == plain
    data = bytearray(golden(f"iser/hello-reply-{form.length}"))
    answered = HelloReply.unpack_untrusted(bytes(data), form.length)
    data[0] |= 0x0E
    data[4:] = b"\xff" * (form.length - 4)
    assert HelloReply.unpack_untrusted(bytes(data), form.length) == answered


@FORMS
@pytest.mark.parametrize("kind", [Hello, HelloReply])
def test_any_other_length_is_an_error(form: Form, kind: type[Hello] | type[HelloReply]) -> None:
    """proves: ISER-9.3-1, ISER-9.4-1, ISER-10.1.3.3-1"""
    name = "hello" if kind is Hello else "hello-reply"
    data = golden(f"iser/{name}-{form.length}")
    for wrong in (b"", data[:1], data[:-1], data + b"\0", data + bytes(48)):
        with pytest.raises(RemoteProtocolError, match="bytes, not"):
            kind.unpack_untrusted(wrong, form.length)


def test_other_messages_are_none() -> None:
    with pytest.raises(RemoteProtocolError, match="opcode 3"):
        Hello.unpack_untrusted(golden("iser/hello-reply-28"), 28)
    with pytest.raises(RemoteProtocolError, match="opcode 2"):
        HelloReply.unpack_untrusted(golden("iser/hello-28"), 28)


def test_versions_that_contradict_each_other() -> None:
    """Inconsistent contents of a header. proves: ISER-10.1.3.3-1"""
    with pytest.raises(RemoteProtocolError, match="versions 10 to 9"):
        Hello.unpack_untrusted(Hello(9, 10, 4).pack(28), 28)
    with pytest.raises(RemoteProtocolError, match="version 10, above 9"):
        HelloReply.unpack_untrusted(HelloReply(False, 9, 10, 4).pack(28), 28)


@given(st.binary(max_size=40), st.sampled_from([12, 28]))
def test_any_bytes(data: bytes, length: int) -> None:
    for kind in (Hello, HelloReply):
        try:
            message = kind.unpack_untrusted(data, length)
        except RemoteProtocolError:
            continue
        assert len(data) == length
        assert kind.unpack_untrusted(message.pack(length), length) == message


# shows: SYSTEM-31
@pytest.mark.parametrize(("ord", "ird", "agreed"), [(4, 9, 4), (9, 4, 4), (5, 5, 5), (9, 0, 0)])
def test_the_target_takes_the_minimum(ord: int, ird: int, agreed: int) -> None:
    """proves: ISER-5.1.3-4, ISER-5.1.3-6"""
    reply = answer(RFC_7145, greeting(RFC_7145, ird), ord)
    assert (reply.rejected, reply.ord) == (False, agreed)


@FORMS
def test_a_target_without_reads_rejects_an_initiator_that_takes_some(form: Form) -> None:
    """proves: ISER-5.1.3-8, ISER-10.1.3.2-2"""
    assert answer(form, greeting(form, 1), 0).rejected
    assert not answer(form, greeting(form, 0), 0).rejected  # none are taken, none are made


# shows: SYSTEM-31
@pytest.mark.parametrize(
    ("form", "largest", "smallest", "rejected"),
    [
        (RFC_7145, 10, 10, False),
        (RFC_7145, 1, 1, False),  # the figures of appendix B
        (RFC_7145, 15, 0, False),
        (RFC_7145, 9, 2, True),
        (RFC_7145, 15, 11, True),
        (RFC_7145, 0, 0, True),
        (RFC_5046, 1, 1, False),
        (RFC_5046, 10, 10, True),
        (RFC_5046, 0, 0, True),
        (RFC_5046, 15, 2, True),
        (RFC_5046, 2, 0, False),
    ],
)
def test_versions_must_overlap(form: Form, largest: int, smallest: int, rejected: bool) -> None:
    """The reply names our own version in any case.

    proves: ISER-5.1.3-9, ISER-10.1.3.2-2, ISER-7145-9.3-1
    """
    reply = answer(form, Hello(largest, smallest, 4), 4)
    assert reply.rejected is rejected
    assert reply.max_version == reply.version == form.version


@pytest.mark.parametrize(
    ("form", "reply", "words"),
    [
        (RFC_7145, HelloReply(True, 10, 10, 0), "rejects this connection"),
        (RFC_7145, HelloReply(False, 10, 9, 4), "of version 9"),
        (RFC_5046, HelloReply(False, 10, 10, 4), "of version 10"),
        (RFC_7145, HelloReply(False, 10, 10, 5), "wants 5 RDMA Reads"),
        (RFC_7145, HelloReply(False, 10, 10, 0), "did not say REJ"),
    ],
)
def test_replies_that_end_the_connection(form: Form, reply: HelloReply, words: str) -> None:
    """proves: ISER-9.4-7, ISER-10.1.3.3-1"""
    with pytest.raises(RemoteProtocolError, match=words):
        check_reply_untrusted(form, greeting(form, 4), reply)


@pytest.mark.parametrize("ord", [1, 4])
@pytest.mark.parametrize("version", [1, 10])
def test_replies_that_are_good(version: int, ord: int) -> None:
    """A target that has taken the figures of appendix B by their word has version 1."""
    check_reply_untrusted(RFC_7145, greeting(RFC_7145, 4), HelloReply(False, 10, version, ord))


def test_a_depth_that_does_not_fit_is_declared_as_the_most() -> None:
    """proves: ISER-5.1.1-8"""
    assert greeting(RFC_7145, 1 << 20).ird == 0xFFFF
