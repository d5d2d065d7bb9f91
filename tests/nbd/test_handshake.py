"""The handshake of the NBD server, as a client goes through it; and what clients get wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.nbd import handshake as nbd
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import TABLE, Event, Handshake, Look, StartTls, State, Tls
from tests.nbd.conversation import (
    ABORT,
    ACK,
    EXPORT_NAME,
    EXT_HEADER_REQD,
    EXTENDED_HEADERS,
    FIXED,
    GO,
    INFO,
    INFORMATION,
    INVALID,
    LIST,
    LIST_META_CONTEXT,
    META_CONTEXT,
    NO_ZEROES,
    POLICY,
    SERVER,
    SET_META_CONTEXT,
    STARTTLS,
    STRUCTURED_REPLY,
    TLS_REQD,
    TOO_BIG,
    UNKNOWN,
    UNSUP,
    Answer,
    about,
    answers,
    client_flags,
    contexts,
    export,
    option,
    string,
)

EXPORTS: Mapping[str, Export] = {
    "lun0": export("lun0"),
    "lün1": export("lün1", read_only=True, size=4096, can_trim=False),
}
HAS, READ_ONLY, FLUSH, FUA, TRIM, ZEROES, DF, MULTI, CACHE, FAST, PAYLOAD = (
    1 << bit for bit in (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12)
)
LUN0 = HAS | FLUSH | FUA | TRIM | ZEROES | MULTI | CACHE | FAST
LUN1 = HAS | READ_ONLY | FLUSH | FUA | MULTI | CACHE


def begin(tls: Tls = Tls.OFF, flags: int = FIXED | NO_ZEROES) -> Handshake:
    """A handshake whose client has said its flags."""
    handshake = Handshake(EXPORTS, "lun0", tls)
    handshake.data_to_send()
    assert handshake.receive_data(client_flags(flags)) is None
    return handshake


def play(handshake: Handshake, data: bytes) -> bytes:
    """Feed ``data``, and do what is asked for; returns all that the server says."""
    event = handshake.receive_data(data)
    while event is not None:
        if isinstance(event, Look):
            handshake.looked()
        else:
            handshake.secured()
        event = handshake.receive_data(b"")
    return handshake.data_to_send()


def ask(handshake: Handshake, number: int, data: bytes = b"") -> list[Answer]:
    found = answers(play(handshake, option(number, data)))
    assert {each.option for each in found} == {number}
    return found


def verdict(handshake: Handshake, number: int, data: bytes = b"") -> int:
    """The type of the one reply."""
    (answer,) = ask(handshake, number, data)
    return answer.kind


def breaks_off(handshake: Handshake, data: bytes, words: str) -> None:
    """``data`` ends the connection, and nothing that came with it is answered later."""
    with pytest.raises(RemoteProtocolError, match=words):
        play(handshake, data)
    assert handshake.state is State.ENDED and handshake.negotiated is None
    handshake.data_to_send()
    assert play(handshake, option(LIST)) == b""


# -- the way to the transmission -------------------------------------------------------------------


def test_the_server_speaks_first() -> None:
    handshake = Handshake(EXPORTS, "lun0")
    assert handshake.data_to_send() == bytes.fromhex("4e42444d41474943 49484156454f5054 0003")
    assert handshake.data_to_send() == b""
    assert handshake.state is State.GREETED


def test_go_tells_of_the_export_and_ends_the_handshake() -> None:
    handshake = begin()
    found = ask(handshake, GO, about("lun0"))
    assert [each.kind for each in found] == [INFORMATION, ACK]
    assert found[0].data == struct.pack(">HQH", 0, 1 << 20, LUN0) and found[1].data == b""
    agreed = handshake.negotiated
    assert agreed is not None and handshake.state is State.TRANSMISSION
    assert agreed == ("lun0", False, False, False, LUN0)


def test_information_that_was_asked_for() -> None:
    found = ask(begin(), INFO, about("", 1, 2, 3, 0, 3, 99))
    described = EXPORTS["lun0"].description.encode()
    assert [each.data for each in found] == [
        struct.pack(">HQH", 0, 1 << 20, LUN0),
        b"\0\1lun0",
        b"\0\2" + described,
        struct.pack(">HIII", 3, 1, 4096, 32 << 20),
        b"",
    ]
    assert [each.kind for each in found] == [INFORMATION] * 4 + [ACK]


def test_info_leaves_the_client_its_choice() -> None:
    handshake = begin()
    assert ask(handshake, INFO, about("lun0"))[-1].kind == ACK
    assert handshake.state is State.OPTIONS and handshake.negotiated is None
    assert ask(handshake, GO, about("lün1"))[0].data == struct.pack(">HQH", 0, 4096, LUN1)
    assert handshake.negotiated is not None and handshake.negotiated.export == "lün1"


@pytest.mark.parametrize(("flags", "zeroes"), [(0, 124), (FIXED, 124), (FIXED | NO_ZEROES, 0)])
def test_export_name(flags: int, zeroes: int) -> None:
    handshake = begin(flags=flags)
    told = play(handshake, option(EXPORT_NAME, "lün1".encode()))
    assert told == struct.pack(">QH", 4096, LUN1) + bytes(zeroes)
    assert handshake.state is State.TRANSMISSION


def test_an_empty_name_is_the_default_export() -> None:
    handshake = begin()
    play(handshake, option(EXPORT_NAME))
    assert handshake.negotiated is not None and handshake.negotiated.export == "lun0"


def test_the_size_is_that_of_the_moment() -> None:
    """The caller has asked the target between the two calls."""
    growing = export("lun0")
    handshake = Handshake({"lun0": growing}, "lun0")
    handshake.data_to_send()
    event = handshake.receive_data(client_flags() + option(GO, about("")))
    assert event == Look(growing) and handshake.data_to_send() == b""
    grown = export("lun0", size=1 << 21)
    growing.disk = grown.disk
    handshake.looked()
    assert struct.unpack_from(">Q", answers(handshake.data_to_send())[0].data, 2) == (1 << 21,)


def test_what_came_behind_the_handshake_is_left() -> None:
    handshake = begin()
    play(handshake, option(GO, about("")) + b"requests")
    assert handshake.rest() == b"requests" and handshake.rest() == b""


def test_list() -> None:
    found = ask(begin(), LIST)
    assert [each.kind for each in found] == [SERVER, SERVER, ACK]
    for answer, (name, each) in zip(found, EXPORTS.items(), strict=False):
        assert answer.data == string(name) + each.description.encode()


def test_abort() -> None:
    handshake = begin()
    assert verdict(handshake, ABORT, b"good bye") == ACK
    assert handshake.state is State.ENDED
    assert play(handshake, option(LIST)) == b""


# -- what may be negotiated ------------------------------------------------------------------------


def agreed(*options: bytes) -> tuple[bool, bool, bool, int]:
    handshake = begin()
    play(handshake, b"".join(options) + option(GO, about("lun0")))
    assert handshake.negotiated is not None
    return handshake.negotiated[1:]


ALLOCATION = contexts("lun0", "base:allocation")


def test_what_was_agreed_on() -> None:
    structured, extended = option(STRUCTURED_REPLY), option(EXTENDED_HEADERS)
    select = option(SET_META_CONTEXT, ALLOCATION)
    assert agreed() == (False, False, False, LUN0)
    assert agreed(structured) == (True, False, False, LUN0 | DF)
    assert agreed(structured, select) == (True, False, True, LUN0 | DF)
    assert agreed(extended) == (True, True, False, LUN0 | DF)
    assert agreed(structured, extended) == (True, True, False, LUN0 | DF)
    assert agreed(extended, select) == (True, True, True, LUN0 | DF | PAYLOAD)
    assert agreed(structured, select, extended) == (True, True, True, LUN0 | DF | PAYLOAD)


def test_contexts_are_those_of_the_last_selection() -> None:
    structured, select = option(STRUCTURED_REPLY), option(SET_META_CONTEXT, ALLOCATION)
    for later in (
        contexts("lun0"),  # none
        contexts("lün1", "base:allocation"),  # of another export
        contexts("nothing", "base:allocation"),  # it fails
        ALLOCATION + b"x",
        bytes(1 << 17),
    ):
        handshake = begin()
        play(handshake, structured + select + option(SET_META_CONTEXT, later))
        play(handshake, option(GO, about("lun0")))
        assert handshake.negotiated is not None and not handshake.negotiated.contexts, later[:40]
    assert agreed(structured, select, option(LIST_META_CONTEXT, contexts("lun0")))[2]


def test_contexts() -> None:
    handshake = begin()
    for number in (LIST_META_CONTEXT, SET_META_CONTEXT):
        assert verdict(handshake, number, ALLOCATION) == INVALID  # without structured replies
    play(handshake, option(STRUCTURED_REPLY))
    for queries, listed, selected in (
        ((), True, False),
        (("base:",), True, False),
        (("base:allocation",), True, True),
        (("qemu:dirty-bitmap:x", "base:allocation", "base:allocation"), True, True),
        (("qemu:allocation-depth", "base:nothing", "base", ""), False, False),
    ):
        for number, found, identifier in (
            (LIST_META_CONTEXT, listed, 0),
            (SET_META_CONTEXT, selected, 1),
        ):
            told = ask(handshake, number, contexts("", *queries))
            wanted = [identifier.to_bytes(4) + b"base:allocation"] if found else []
            assert [each.data for each in told[:-1]] == wanted
            assert [each.kind for each in told] == [META_CONTEXT] * len(wanted) + [ACK]
    assert verdict(handshake, LIST_META_CONTEXT, contexts("nothing")) == UNKNOWN


def test_the_same_again() -> None:
    handshake = begin()
    assert verdict(handshake, STRUCTURED_REPLY) == ACK
    assert verdict(handshake, STRUCTURED_REPLY) == INVALID
    assert verdict(handshake, EXTENDED_HEADERS) == ACK
    assert verdict(handshake, EXTENDED_HEADERS) == INVALID
    assert verdict(handshake, STRUCTURED_REPLY) == EXT_HEADER_REQD
    play(handshake, option(GO, about("")))
    assert handshake.negotiated is not None and handshake.negotiated.extended


def test_extended_headers_do_not_go_with_export_name() -> None:
    handshake = begin()
    play(handshake, option(EXTENDED_HEADERS))
    breaks_off(handshake, option(EXPORT_NAME, b"lun0"), "EXPORT_NAME: .*extended headers")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "data", "kind"),
    [
        (4, b"", UNSUP),  # PEEK_EXPORT, which was withdrawn
        (12, b"x", UNSUP),
        (0xFFFFFFFF, b"", UNSUP),
        (LIST, b"x", INVALID),
        (STARTTLS, b"", POLICY),
        (STARTTLS, b"x", INVALID),
        (STRUCTURED_REPLY, b"x", INVALID),
        (EXTENDED_HEADERS, b"x", INVALID),
        (INFO, b"", INVALID),
        (INFO, about("lun0")[:-1], INVALID),
        (INFO, about("lun0") + b"x", INVALID),
        (INFO, string("lun0") + b"\0\2\0\3", INVALID),
        (INFO, b"\xff\xff\xff\xfflun0\0\0", INVALID),
        (INFO, about("nothing"), UNKNOWN),
        (GO, about("nothing"), UNKNOWN),
        (GO, about(b"\xff"), INVALID),
        (GO, about("lun0\0"), INVALID),
        (GO, about("x" * 4096), UNKNOWN),
        (GO, about("x" * 4097), INVALID),
        (LIST_META_CONTEXT, b"", INVALID),
        (SET_META_CONTEXT, string("lun0") + b"\0\0\0\2" + string("base:"), INVALID),
        (SET_META_CONTEXT, string("lun0") + b"\xff\xff\xff\xff" + string("base:"), INVALID),
        (SET_META_CONTEXT, ALLOCATION + b"x", INVALID),
        (SET_META_CONTEXT, contexts("lun0", *["x:"] * 1025), TOO_BIG),
        (LIST_META_CONTEXT, contexts("lun0", *["x:"] * 1024), ACK),
    ],
)
def test_refusals(number: int, data: bytes, kind: int) -> None:
    handshake = begin()
    if number in (LIST_META_CONTEXT, SET_META_CONTEXT):
        play(handshake, option(STRUCTURED_REPLY))
    (answer,) = ask(handshake, number, data)
    assert answer.kind == kind
    assert kind == ACK or answer.data.decode()  # words for a user
    assert ask(handshake, GO, about("lun0"))[-1].kind == ACK  # and the next one is understood


@pytest.mark.parametrize(
    ("name", "words"),
    [(b"nothing", "no export 'nothing'"), (b"\xff", "UTF-8"), (b"a\0", "NUL"), (b"x" * 4097, "")],
)
def test_an_export_name_that_cannot_be_ends_the_connection(name: bytes, words: str) -> None:
    breaks_off(begin(), option(EXPORT_NAME, name), f"EXPORT_NAME: .*{words}")


@pytest.mark.parametrize("number", [ABORT, LIST, INFO, GO, STARTTLS, STRUCTURED_REPLY, 99])
def test_without_fixed_newstyle_there_is_export_name_only(number: int) -> None:
    handshake = begin(Tls.ON, flags=NO_ZEROES)
    assert verdict(handshake, number) == INVALID
    play(handshake, option(EXPORT_NAME, b"lun0"))
    assert handshake.negotiated is not None


@pytest.mark.parametrize("flags", [4, 1 << 31, 0xFFFFFFFF])
def test_unknown_client_flags_end_the_connection(flags: int) -> None:
    handshake = Handshake(EXPORTS, "lun0")
    breaks_off(handshake, client_flags(flags), "unknown client flags")


def test_what_is_no_option_ends_the_connection() -> None:
    handshake = begin()
    breaks_off(handshake, option(LIST)[:-1] + b"\0" + b"IHAVEOPS" + bytes(8), "IHAVEOPT")


# -- TLS -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [LIST, INFO, GO, STRUCTURED_REPLY, EXTENDED_HEADERS, 99])
def test_tls_may_be_required(number: int) -> None:
    handshake = begin(Tls.REQUIRE)
    assert verdict(handshake, number, about("lun0")) == TLS_REQD
    assert verdict(handshake, number, bytes(100_000)) == TLS_REQD  # also with too much data
    assert handshake.negotiated is None
    assert verdict(handshake, STARTTLS) == ACK
    assert TLS_REQD not in [each.kind for each in ask(handshake, number, about("lun0"))]


def test_where_tls_is_required_a_client_may_leave() -> None:
    assert verdict(begin(Tls.REQUIRE), ABORT) == ACK


@pytest.mark.parametrize("flags", [0, FIXED])
def test_where_tls_is_required_there_is_no_export_without(flags: int) -> None:
    breaks_off(begin(Tls.REQUIRE, flags), option(EXPORT_NAME, b"lun0"), "EXPORT_NAME: .*TLS")


@pytest.mark.parametrize("tls", [Tls.ON, Tls.REQUIRE])
def test_starttls(tls: Tls) -> None:
    handshake = begin(tls)
    event = handshake.receive_data(option(STARTTLS))
    assert isinstance(event, StartTls) and handshake.state is State.SECURING
    assert answers(handshake.data_to_send()) == [(STARTTLS, ACK, b"")]
    handshake.secured()
    assert verdict(handshake, STARTTLS) == INVALID
    assert ask(handshake, GO, about("lun0"))[-1].kind == ACK


def test_starttls_forgets_what_came_without_tls() -> None:
    handshake = begin(Tls.ON)
    play(handshake, option(EXTENDED_HEADERS) + option(SET_META_CONTEXT, ALLOCATION))
    play(handshake, option(STARTTLS))
    play(handshake, option(GO, about("lun0")))
    assert handshake.negotiated == ("lun0", False, False, False, LUN0)


@pytest.mark.parametrize("behind", [b"I", option(LIST), option(GO, about("lun0")), b"\x16\x03\x01"])
def test_bytes_that_were_put_behind_starttls_end_the_connection(behind: bytes) -> None:
    """They came in clear text, and would be taken for what comes by TLS."""
    handshake = begin(Tls.REQUIRE)
    breaks_off(handshake, option(STARTTLS) + behind, "behind STARTTLS")


# -- floods ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"), [(LIST, TOO_BIG), (GO, TOO_BIG), (99, UNSUP), (ABORT, ACK)]
)
@pytest.mark.parametrize("piece", [1000, 1 << 20])
def test_an_option_with_too_much_data(number: int, kind: int, piece: int) -> None:
    handshake = begin()
    data = option(number, bytes(nbd.MOST_OPTION + 1)) + option(STRUCTURED_REPLY)
    told = b"".join(play(handshake, data[at : at + piece]) for at in range(0, len(data), piece))
    first, *rest = answers(told)
    assert (first.option, first.kind) == (number, kind)
    assert rest == ([] if number == ABORT else [(STRUCTURED_REPLY, ACK, b"")])


def test_an_option_with_as_much_data_as_may_be() -> None:
    assert verdict(begin(), LIST, bytes(nbd.MOST_OPTION)) == INVALID


def test_too_much_data_ends_the_connection() -> None:
    breaks_off(begin(), option(LIST, length=0xFFFFFFFF), "bytes of data")
    breaks_off(begin(), option(EXPORT_NAME, length=nbd.MOST_OPTION + 1), "bytes of data")
    handshake = begin()
    for _ in range(8):
        play(handshake, option(99, bytes(nbd.MOST_PASSED_OVER // 8)))
    breaks_off(handshake, option(99, length=nbd.MOST_OPTION + 1), "bytes of data")


@pytest.mark.parametrize("data", [b"", about("lun0")])
def test_options_without_end(data: bytes) -> None:
    handshake = begin()
    for _ in range(nbd.MOST_OPTIONS + nbd.MOST_OPTIONS_EACH * len(EXPORTS)):
        ask(handshake, INFO, data)
    breaks_off(handshake, option(INFO, data), "options, and no export")


@pytest.mark.parametrize("count", [128, 3000])
def test_a_client_may_ask_about_each_of_many_exports(count: int) -> None:
    """As `nbdinfo --list` does; and without waiting for the list, which may be a long one."""
    many = {f"lun{number}": export(f"lun{number}", size=512) for number in range(count)}
    handshake = Handshake(many, "lun0")
    handshake.data_to_send()
    first = option(STRUCTURED_REPLY) + option(LIST) + option(LIST_META_CONTEXT, contexts("lun0"))
    listed = answers(play(handshake, client_flags() + first))
    assert [each.kind for each in listed].count(SERVER) == count
    for name in many:
        for number, data in (
            (LIST_META_CONTEXT, contexts(name)),
            (SET_META_CONTEXT, contexts(name, "base:allocation")),
            (INFO, about(name)),
        ):
            *_, last = answers(play(handshake, option(number, data)))
            assert last.kind == ACK
    ask(handshake, GO, about("lun7"))
    assert handshake.negotiated is not None


def test_replies_that_a_client_does_not_wait_for_do_not_pile_up() -> None:
    many = {f"lun{number}": export(f"lun{number}") for number in range(100)}
    handshake = Handshake(many, "lun0")
    flood = client_flags() + option(LIST) * nbd.MOST_OPTIONS
    with pytest.raises(RemoteProtocolError, match="before the replies"):
        handshake.receive_data(flood)
    one = sum(44 + len(each.name) + len(each.description) for each in many.values())
    assert len(handshake.data_to_send()) < nbd.MOST_UNREAD + 2 * one


# -- pieces, and bytes of any kind -----------------------------------------------------------------

CONVERSATION = (
    client_flags()
    + option(STRUCTURED_REPLY)
    + option(LIST)
    + option(99, bytes(nbd.MOST_OPTION + 7))
    + option(SET_META_CONTEXT, ALLOCATION)
    + option(INFO, about("lün1", 3))
    + option(INFO, about("nothing"))
    + option(GO, about("lun0", 1, 3))
)


def test_byte_by_byte_as_in_one_piece() -> None:
    whole, piecemeal = Handshake(EXPORTS, "lun0"), Handshake(EXPORTS, "lun0")
    told = play(whole, CONVERSATION + b"more")
    pieces = [play(piecemeal, bytes([byte])) for byte in CONVERSATION]
    assert b"".join(pieces) == told
    assert piecemeal.negotiated == whole.negotiated is not None
    assert whole.rest() == b"more" and piecemeal.rest() == b""


@given(st.lists(st.integers(1, len(CONVERSATION) - 1), max_size=20))
def test_in_any_pieces(cuts: list[int]) -> None:
    whole, piecemeal = Handshake(EXPORTS, "lun0"), Handshake(EXPORTS, "lun0")
    edges = [0, *sorted(cuts), len(CONVERSATION)]
    told = [play(piecemeal, CONVERSATION[a:b]) for a, b in pairwise(edges)]
    assert b"".join(told) == play(whole, CONVERSATION)
    assert piecemeal.negotiated == whole.negotiated


@given(st.lists(st.tuples(st.integers(0, 12), st.binary(max_size=60)), max_size=8), st.binary())
def test_bytes_of_any_kind(options: list[tuple[int, bytes]], rest: bytes) -> None:
    handshake = begin(Tls.ON)
    try:
        for number, data in options:
            play(handshake, option(number, data))
        play(handshake, rest)
    except RemoteProtocolError:
        assert handshake.state is State.ENDED


# -- states ----------------------------------------------------------------------------------------


def in_state(state: State) -> Handshake:
    """A handshake that has come there by what its client said."""
    handshake = Handshake(EXPORTS, "lun0", Tls.ON)
    if state is not State.GREETED:
        handshake.receive_data(client_flags())
    said = {
        State.LOOKING: option(GO, about("lun0")),
        State.TRANSMISSION: option(GO, about("lun0")),
        State.SECURING: option(STARTTLS),
        State.ENDED: option(ABORT),
    }
    handshake.receive_data(said.get(state, b""))
    if state is State.TRANSMISSION:
        handshake.looked()
    handshake.data_to_send()
    assert handshake.state is state
    return handshake


MISSING = [pair for pair in product(State, Event) if pair not in TABLE]


@pytest.mark.parametrize(("state", "event"), list(TABLE))
def test_what_the_table_has_leads_on(state: State, event: Event) -> None:
    handshake = in_state(state)
    handshake.enter(event)
    assert handshake.state is TABLE[state, event]


@pytest.mark.parametrize(("state", "event"), MISSING)
def test_what_the_table_does_not_have_changes_nothing(state: State, event: Event) -> None:
    handshake = in_state(state)
    agreed = handshake.negotiated
    with pytest.raises(LocalProtocolError, match=f"that is {state} cannot take"):
        handshake.enter(event)
    assert handshake.state is state
    assert handshake.data_to_send() == b"" and handshake.negotiated is agreed


@pytest.mark.parametrize("state", State)
def test_callers_may_not_answer_what_was_not_asked(state: State) -> None:
    for name, right in (("looked", State.LOOKING), ("secured", State.SECURING)):
        if state is right:
            continue
        handshake = in_state(state)
        agreed = handshake.negotiated
        with pytest.raises(LocalProtocolError):
            getattr(handshake, name)()
        assert handshake.state is state
        assert handshake.data_to_send() == b"" and handshake.negotiated is agreed


def test_only_the_two_ends_are_final() -> None:
    assert {state for state in State if state not in {left for left, _ in TABLE}} == {
        State.TRANSMISSION,
        State.ENDED,
    }
