"""CHAP between our two sides, against independently computed digests, and against liars."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import AuthenticationError, BadArgument, RemoteProtocolError
from iserblk.iscsi import chap
from iserblk.iscsi.chap import Accounts, ChapInitiator, ChapTarget, Credentials, Pairs
from iserblk.secret import Secret

SECRET, TARGET_SECRET = Secret("hush-hush-hush"), Secret("not-a-word-more")
ONE_WAY = Credentials("host", SECRET)
MUTUAL = Credentials("host", SECRET, "disk", TARGET_SECRET)
ACCOUNTS = Accounts({"other": Secret("somebody-elses"), "host": SECRET}, "disk", TARGET_SECRET)

# Identifier 9Ah, secret "secret-of-12-bytes", challenge 00h to 0Fh, as `openssl dgst` has it.
VECTORS = {
    chap.MD5: "96bcde77c7060c7dadccda84a780d8da",
    chap.SHA1: "9d325da59bd03be8639aa4d7cc07cbbbba463509",
    chap.SHA256: "3cd42d318c7306101561cb5e1080a46fd78e0db83919341197c6e76e50d3bbac",
    chap.SHA3_256: "7d0e47cb607b2f64fb03cbd889e54518107979b40b1a27d6fcf641228fbb72ec",
}


def exchange(one: ChapInitiator, other: ChapTarget) -> list[Pairs]:
    """Everything that was said, in order."""
    said = [one.start()]
    said.append(other.receive(said[-1]))
    said.append(one.receive(said[-1]))
    said.append(other.receive(said[-1]))
    assert one.receive(said[-1]) == []
    return said


def challenged(credentials: Credentials = ONE_WAY, **changed: str) -> Callable[[], Pairs]:
    """The initiator's answer to a challenge, with these values in it."""
    pairs = {"CHAP_A": "5", "CHAP_I": "7", "CHAP_C": "0x" + "a5" * 16, **changed}
    one = ChapInitiator(credentials)
    one.start()
    return lambda: one.receive([pair for pair in pairs.items() if pair[1] != "absent"])


def challenging() -> tuple[ChapTarget, dict[str, str]]:
    other = ChapTarget(ACCOUNTS)
    return other, dict(other.receive([("CHAP_A", "7")]))


def proof(challenge: dict[str, str], secret: str) -> str:
    octets = bytes((int(challenge["CHAP_I"]),)) + secret.encode()
    octets += bytes.fromhex(challenge["CHAP_C"][2:])
    return "0x" + hashlib.sha256(octets).hexdigest()


# -- digests and values --------------------------------------------------------------------------


# shows: SYSTEM-45
@pytest.mark.parametrize("algorithm", VECTORS)
def test_known_responses(algorithm: int) -> None:
    ours = chap.response(algorithm, 0x9A, Secret("secret-of-12-bytes"), bytes(range(16)))
    assert ours.hex() == VECTORS[algorithm]


@given(
    st.sampled_from(sorted(VECTORS)),
    st.integers(0, 255),
    st.text(min_size=1).filter(lambda text: text.isprintable()),
    st.binary(min_size=1, max_size=chap.MAXIMUM_BINARY),
)
def test_any_response(algorithm: int, identifier: int, secret: str, challenge: bytes) -> None:
    digest = {5: hashlib.md5, 6: hashlib.sha1, 7: hashlib.sha256, 8: hashlib.sha3_256}[algorithm]
    expected = digest(bytes([identifier]) + secret.encode() + challenge).digest()
    assert chap.response(algorithm, identifier, Secret(secret), challenge) == expected


@given(st.binary(min_size=1, max_size=chap.MAXIMUM_BINARY), st.booleans())
def test_binary_values(data: bytes, base_64: bool) -> None:
    text = chap.encode_binary(data, base_64)
    assert chap.decode_binary_untrusted(text, "CHAP_C") == data
    other_case = text[:2].upper() + (text[2:] if base_64 else text[2:].upper())
    assert chap.decode_binary_untrusted(other_case, "CHAP_C") == data


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("0x0", b"\0"),
        ("0xabc", b"\x0a\xbc"),  # an odd number of digits (section 6.1)
        ("0bAAEC", b"\0\1\2"),
        ("0bAA==", b"\0"),
        ("0bAA", b"\0"),  # without padding
        ("0x" + "00" * 1024, bytes(1024)),
        ("0b" + base64.b64encode(bytes(1024)).decode(), bytes(1024)),
    ],
)
def test_values_as_peers_write_them(text: str, data: bytes) -> None:
    assert chap.decode_binary_untrusted(text, "CHAP_C") == data


@pytest.mark.parametrize(
    "text",
    [
        *("", "0x", "0b", "12", "abc", "0xg0", "0x 1", "0x-1", "0x1_0", "0x٣٣", "0b=", "0bA"),
        *("0bAA*A", "0bA A=", "0b\u00e9\u00e9", "0x" + "00" * 1025, "0x" + "0" * 2049),
        "0b" + base64.b64encode(bytes(1025)).decode(),
    ],
)
def test_no_values(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="no binary value of 1 to 1024 bytes"):
        chap.decode_binary_untrusted(text, "CHAP_R")


@pytest.mark.parametrize("text", ["", "256", "-1", "0x100", "1e1", "01", "٣", "+1", "9" * 99])
def test_no_identifier(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        chap.decode_number_untrusted(text, "CHAP_I", 255)


@given(st.text())
def test_any_text_as_a_value(text: str) -> None:
    for candidate in (text, f"0x{text}", f"0b{text}"):
        try:
            assert 1 <= len(chap.decode_binary_untrusted(candidate, "CHAP_C")) <= 1024
        except RemoteProtocolError as error:
            assert str(error) == "iSCSI: CHAP_C is no binary value of 1 to 1024 bytes"


# -- both sides ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", VECTORS)
@pytest.mark.parametrize("credentials", [ONE_WAY, MUTUAL])
def test_exchange(credentials: Credentials, algorithm: int) -> None:
    wanted = Credentials(
        credentials.user,
        credentials.secret,
        credentials.target_user,
        credentials.target_secret,
        (algorithm,),
    )
    one, other = ChapInitiator(wanted), ChapTarget(ACCOUNTS)
    said = [[name for name, _ in pairs] for pairs in exchange(one, other)]
    more = ["CHAP_I", "CHAP_C"] if credentials is MUTUAL else []
    proved = ["CHAP_N", "CHAP_R"] if credentials is MUTUAL else []
    assert said == [
        ["CHAP_A"],
        ["CHAP_A", "CHAP_I", "CHAP_C"],
        ["CHAP_N", "CHAP_R", *more],
        proved,
    ]
    assert one.done and other.done and other.user == "host"


def test_preference() -> None:
    """The target takes the first algorithm it knows; MD5 precedes the number that tgtd misreads."""
    other = ChapTarget(ACCOUNTS)
    assert dict(other.receive([("CHAP_A", "99,0x6,5")]))["CHAP_A"] == "6"
    assert dict(ChapTarget(ACCOUNTS).receive(ChapInitiator(ONE_WAY).start()))["CHAP_A"] == "8"
    assert chap.OFFER.index(chap.MD5) < chap.OFFER.index(chap.SHA256)
    assert set(chap.OFFER) == set(VECTORS)


def test_challenges_and_identifiers_are_new_each_time() -> None:
    seen = {challenging()[1]["CHAP_C"] for _ in range(50)}
    seen |= {dict(challenged(MUTUAL)())["CHAP_C"] for _ in range(50)}
    assert len(seen) == 100
    assert all(len(challenge) == 2 + 2 * 32 for challenge in seen)


def test_base64_is_answered_in_base64() -> None:
    said = dict(challenged(MUTUAL, CHAP_C="0b" + base64.b64encode(bytes(16)).decode())())
    assert said["CHAP_R"][:2] == said["CHAP_C"][:2] == "0b"
    assert len(chap.decode_binary_untrusted(said["CHAP_R"], "CHAP_R")) == 16


def test_longest_challenges() -> None:
    assert dict(challenged(CHAP_C="0x" + "a5" * 1024)())["CHAP_N"] == "host"
    other, challenge = challenging()
    mine = ("CHAP_C", "0b" + base64.b64encode(bytes(1024)).decode())
    answer = other.receive(
        [
            ("CHAP_N", "host"),
            ("CHAP_R", proof(challenge, SECRET.reveal())),
            ("CHAP_I", "0"),
            mine,
        ]
    )
    expected = hashlib.sha256(b"\0" + TARGET_SECRET.reveal().encode() + bytes(1024)).digest()
    assert answer == [("CHAP_N", "disk"), ("CHAP_R", chap.encode_binary(expected, True))]


# -- the target lies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"CHAP_A": "absent"},
        {"CHAP_I": "absent"},
        {"CHAP_C": "absent"},
        {"CHAP_C": ""},
        {"CHAP_A": "4"},
        {"CHAP_A": "5,6"},
        {"CHAP_A": "Reject"},
        {"CHAP_I": "256"},
        {"CHAP_C": "0x00"},
        {"CHAP_C": "0x" + "00" * 1025},
        {"CHAP_N": "disk"},
        {"CHAP_Z": "1"},
    ],
)
def test_challenge_that_is_none(changed: dict[str, str]) -> None:
    with pytest.raises(RemoteProtocolError):
        challenged(**changed)()  # type: ignore[arg-type]


def test_algorithm_that_was_not_offered() -> None:
    only = Credentials("host", SECRET, algorithms=(chap.SHA256,))
    with pytest.raises(RemoteProtocolError, match="CHAP_A=5 was not offered"):
        challenged(only)()


def mutual() -> tuple[ChapInitiator, dict[str, str]]:
    one = ChapInitiator(MUTUAL)
    one.start()
    said = one.receive([("CHAP_A", "7"), ("CHAP_I", "7"), ("CHAP_C", "0x" + "a5" * 16)])
    assert not one.done
    return one, dict(said)


def test_the_target_proves_itself() -> None:
    one, said = mutual()
    right = proof(said, TARGET_SECRET.reveal())
    assert one.receive([("CHAP_N", "disk"), ("CHAP_R", right)]) == []
    assert one.done


def test_any_name_will_do_where_none_was_given() -> None:
    one = ChapInitiator(Credentials("host", SECRET, target_secret=TARGET_SECRET))
    exchange(one, ChapTarget(ACCOUNTS))
    assert one.done


@pytest.mark.parametrize(
    ("name", "secret", "words"),
    [
        ("disk", "wrong-wrong-wrong", "did not prove who it is"),
        ("disc", TARGET_SECRET.reveal(), "did not prove who it is"),
        ("disk", SECRET.reveal(), "has our own secret"),
    ],
)
def test_the_target_is_somebody_else(name: str, secret: str, words: str) -> None:
    one, said = mutual()
    with pytest.raises(AuthenticationError, match=words) as error:
        one.receive([("CHAP_N", name), ("CHAP_R", proof(said, secret))])
    assert not one.done and error.value.exit_status == 24
    assert SECRET.reveal() not in str(error.value)
    assert TARGET_SECRET.reveal() not in str(error.value)


@pytest.mark.parametrize(
    "pairs",
    [[], [("CHAP_N", "disk")], [("CHAP_R", "0x00")], [("CHAP_N", "disk"), ("CHAP_R", "Reject")]],
)
def test_the_target_proves_nothing(pairs: Pairs) -> None:
    one, _ = mutual()
    with pytest.raises(RemoteProtocolError):
        one.receive(pairs)
    assert not one.done


def test_our_challenge_is_never_theirs() -> None:
    """Also when the source of random numbers repeats the target's challenge."""
    numbers = iter([b"\xa5" * 32, b"\x5a" * 32, b"\1"])
    one = ChapInitiator(MUTUAL, lambda _count: next(numbers))
    one.start()
    said = one.receive([("CHAP_A", "5"), ("CHAP_I", "7"), ("CHAP_C", "0x" + "a5" * 32)])
    assert dict(said)["CHAP_C"] == "0x" + "5a" * 32


# -- the initiator lies --------------------------------------------------------------------------


@pytest.mark.parametrize("offer", ["", "x", "5;6", "-5", "5.0"])
def test_offer_that_is_none(offer: str) -> None:
    with pytest.raises(RemoteProtocolError):
        ChapTarget(ACCOUNTS).receive([("CHAP_A", offer)])


def test_no_algorithm_in_common() -> None:
    with pytest.raises(AuthenticationError, match="no algorithm"):
        ChapTarget(ACCOUNTS).receive([("CHAP_A", "1,2,3")])


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("host", "wrong"),
        ("nobody", SECRET.reveal()),
        ("other", SECRET.reveal()),
        ("disk", TARGET_SECRET.reveal()),
        ("host", TARGET_SECRET.reveal()),
    ],
)
def test_wrong_initiator(name: str, secret: str) -> None:
    """An unknown name and a wrong secret get the same answer."""
    other, challenge = challenging()
    with pytest.raises(AuthenticationError) as error:
        other.receive([("CHAP_N", name), ("CHAP_R", proof(challenge, secret))])
    assert str(error.value) == "wrong user name or response"
    assert not other.done and other.user == ""


def test_an_unknown_user_costs_what_a_wrong_secret_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no clock tells which users there are: the same digests of as many bytes, and no other
    work."""
    work: list[object] = []
    new = hashlib.new

    class Digest:
        def __init__(self, name: str, **_: object) -> None:
            self.digest_of = new(name)

        def update(self, data: bytes) -> None:
            work.append(len(data))
            self.digest_of.update(data)

        def digest(self) -> bytes:
            return self.digest_of.digest()

    def random(count: int) -> bytes:
        work.append(f"{count} random bytes")
        return bytes(count)

    def attempt(user: str) -> list[object]:
        accounts = Accounts({"known": Secret("a secret of 22 bytes.."), "other": Secret("x")})
        target = ChapTarget(accounts, random)
        target.receive([("CHAP_A", "7")])
        work.clear()
        monkeypatch.setattr(hashlib, "new", Digest)
        with pytest.raises(AuthenticationError, match="wrong user name or response"):
            target.receive([("CHAP_N", user), ("CHAP_R", "0x" + "ab" * 32)])
        monkeypatch.undo()
        return list(work)

    known = attempt("known")
    assert known and attempt("unknown") == known


def test_our_challenge_comes_back() -> None:
    """The reflection of RFC 7143 section 9.2.1."""
    other, challenge = challenging()
    pairs = [("CHAP_N", "host"), ("CHAP_R", proof(challenge, SECRET.reveal()))]
    with pytest.raises(AuthenticationError, match="our own challenge"):
        other.receive([*pairs, ("CHAP_I", "1"), ("CHAP_C", challenge["CHAP_C"].upper())])
    assert not other.done


@pytest.mark.parametrize("missing", ["CHAP_N", "CHAP_R"])
def test_missing_response(missing: str) -> None:
    other, challenge = challenging()
    pairs = {"CHAP_N": "host", "CHAP_R": "0x00", "CHAP_I": "1", "CHAP_C": challenge["CHAP_C"]}
    del pairs[missing]
    with pytest.raises(chap.MissingKey, match=f"{missing} is missing"):
        other.receive(list(pairs.items()))


@pytest.mark.parametrize("missing", ["CHAP_I", "CHAP_C"])
def test_half_a_challenge(missing: str) -> None:
    other, challenge = challenging()
    pairs = {"CHAP_N": "host", "CHAP_R": proof(challenge, SECRET.reveal())}
    pairs |= {"CHAP_I": "1", "CHAP_C": "0x" + "00" * 16}
    del pairs[missing]
    with pytest.raises(RemoteProtocolError):
        other.receive(list(pairs.items()))
    assert not other.done


def test_mutual_chap_with_a_target_that_has_no_secret() -> None:
    with pytest.raises(AuthenticationError, match="we have no secret"):
        exchange(ChapInitiator(MUTUAL), ChapTarget(Accounts({"host": SECRET})))


def test_nothing_more_after_the_end() -> None:
    other, challenge = challenging()
    other.receive([("CHAP_N", "host"), ("CHAP_R", proof(challenge, SECRET.reveal()))])
    with pytest.raises(RemoteProtocolError, match="does not belong to this step"):
        other.receive([("CHAP_I", "1")])


keys_of_chap = st.sampled_from(["CHAP_A", "CHAP_I", "CHAP_C", "CHAP_N", "CHAP_R", "CHAP_X"])
values = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["5", "7", "5,6,7,8", "host", "disk", "0x00", "0x" + "a5" * 32, "0bAAAAAAAA"]),
)
steps = st.lists(st.lists(st.tuples(keys_of_chap, values), max_size=5), max_size=5)


@given(steps, st.sampled_from([ONE_WAY, MUTUAL]))
def test_any_target(said: list[Pairs], credentials: Credentials) -> None:
    """Documented errors only, and no random login passes mutual CHAP."""
    one = ChapInitiator(credentials)
    one.start()
    for pairs in said:
        try:
            one.receive(pairs)
        except (RemoteProtocolError, AuthenticationError) as error:
            assert SECRET.reveal() not in str(error)
            break
    assert not (one.done and credentials is MUTUAL)


@given(steps)
def test_any_initiator(said: list[Pairs]) -> None:
    other = ChapTarget(ACCOUNTS)
    for pairs in said:
        try:
            other.receive(pairs)
        except (RemoteProtocolError, AuthenticationError):
            break
    assert not other.done


# -- what must not be used -----------------------------------------------------------------------


def test_credentials() -> None:
    for wrong in (
        lambda: Credentials("", SECRET),
        lambda: Credentials("u", Secret()),
        lambda: Credentials("u" * 256, SECRET),
        lambda: Credentials("u\0", SECRET),
        lambda: Credentials("\udcff", SECRET),
        lambda: Credentials("u", SECRET, "t"),
        lambda: Credentials("u", SECRET, "t", Secret(SECRET.reveal())),
        lambda: Accounts({}),
        lambda: Accounts({"u": Secret()}),
        lambda: Accounts({"u": SECRET}, "t"),
        lambda: Accounts({"u": SECRET}, secret=TARGET_SECRET),
        lambda: Accounts({"u": SECRET, "v": TARGET_SECRET}, "t", TARGET_SECRET),
    ):
        with pytest.raises(BadArgument) as error:
            wrong()
        assert SECRET.reveal() not in str(error.value)


def test_nothing_shows_a_secret() -> None:
    for thing in (MUTUAL, ACCOUNTS):
        for secret in (SECRET, TARGET_SECRET):
            assert secret.reveal() not in repr(thing)


def test_secrets_that_are_no_text() -> None:
    """Bytes of a file that are not UTF-8 stay what they are."""
    secret = Secret(b"\xff\xfe-secret".decode(errors="surrogateescape"))
    expected = hashlib.md5(b"\x01\xff\xfe-secretchallenge").digest()
    assert chap.response(chap.MD5, 1, secret, b"challenge") == expected
    assert secret == Secret(secret.reveal())
