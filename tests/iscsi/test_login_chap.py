"""CHAP within the login: the security stage of both sides, and what each refuses."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import AuthenticationError, LoginError, RemoteProtocolError
from iserblk.iscsi import bhs, chap, pdu
from iserblk.iscsi.chap import Accounts, Credentials
from iserblk.iscsi.login_initiator import LoginInitiator
from iserblk.iscsi.login_target import LoginTarget
from iserblk.secret import Secret
from tests.iscsi import logins
from tests.iscsi.logins import Pairs, request, response, said, stages

SECURITY, OPERATIONAL, FULL = 0, 1, 3
SECRET, TARGET_SECRET = Secret("hush-hush-hush"), Secret("not-a-word-more")
ONE_WAY = Credentials("host", SECRET)
MUTUAL = Credentials("host", SECRET, "disk", TARGET_SECRET)
ACCOUNTS = Accounts({"host": SECRET}, "disk", TARGET_SECRET)
WHO: Pairs = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
CHAP: Pairs = [("AuthMethod", "CHAP")]
CHALLENGE: Pairs = [("CHAP_A", "5"), ("CHAP_I", "7"), ("CHAP_C", "0x" + "a5" * 16)]


def started(credentials: Credentials = ONE_WAY) -> LoginInitiator:
    one = logins.initiator(credentials=credentials)
    one.start()
    return one


def status(answer: tuple[bytes, bytes]) -> int:
    return pdu.LoginResponse.unpack_from(answer[0]).status


def ask(other: LoginTarget, message: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    (answer,) = other.receive(*message)
    return answer


# -- both sides ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rdma", [True, False], ids=["iser", "tcp"])
@pytest.mark.parametrize("credentials", [ONE_WAY, MUTUAL])
@pytest.mark.parametrize("discovery", [False, True])
def test_login(credentials: Credentials, discovery: bool, rdma: bool) -> None:
    one = logins.initiator(credentials=credentials, discovery=discovery, rdma=rdma)
    other = logins.target(accounts=ACCOUNTS, rdma=rdma)
    assert logins.login(one, other) == 4
    assert one.done and other.done and not other.failed
    assert (other.user, other.discovery) == ("host", discovery)
    assert discovery or not rdma or one.parameters == other.parameters
    assert one.parameters.rdma_extensions is (rdma and not discovery)
    assert one.exp_stat_sn == other.stat_sn


def security(credentials: Credentials, rdma: bool) -> list[tuple[bytes, bytes]]:
    """All PDUs of the security stage, with the same identifier and challenges each time."""
    one = logins.initiator(credentials=credentials, rdma=rdma)
    other = logins.target(accounts=ACCOUNTS, rdma=rdma)
    kept, asked = [], [one.start()]
    while asked:
        (answer,) = other.receive(*asked[0])
        kept += [each for each in (asked[0], answer) if stages(each[0])[0] == SECURITY]
        asked = one.receive(*answer)
    assert one.done and other.done
    return kept


@pytest.mark.parametrize("credentials", [ONE_WAY, MUTUAL])
def test_security_does_not_depend_on_the_transport(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over iSER both sides send, octet for octet, what they send over TCP.

    proves: ISER-2.3-4, ISER-11-2, ISER-IB00-3.1.6.4-1
    """
    for kind, value in ((chap.ChapInitiator, b"i"), (chap.ChapTarget, b"t")):
        random = lambda count, value=value: value * count  # noqa: E731
        monkeypatch.setattr(kind.__init__, "__defaults__", (random,))
    kept = security(credentials, rdma=True)
    assert len(kept) == 6 and kept == security(credentials, rdma=False)
    names = {name for message in kept for name in said(message)}
    assert {"CHAP_A", "CHAP_I", "CHAP_C", "CHAP_N", "CHAP_R"} <= names
    with pytest.raises(AuthenticationError):
        security(Credentials("host", TARGET_SECRET), rdma=True)


def test_what_is_agreed_is_the_same_with_and_without() -> None:
    plain = logins.initiator()
    logins.login(plain, logins.target())
    one = logins.initiator(credentials=MUTUAL)
    logins.login(one, logins.target(accounts=ACCOUNTS))
    assert one.parameters == plain.parameters
    assert (plain.parameters.chap, plain.parameters.chap_algorithm) == ("none", "")
    assert (one.parameters.chap, one.parameters.chap_algorithm) == ("mutual", "sha3-256")


def test_rounds() -> None:
    """The stages, T bits and keys of RFC 7143 appendix B."""
    one, other = logins.initiator(credentials=MUTUAL), logins.target(accounts=ACCOUNTS)
    seen = []
    asked = [one.start()]
    while asked:
        (answer,) = other.receive(*asked[0])
        for message in (asked[0], answer):
            names = [name for name in said(message) if name[:4] in ("Auth", "CHAP")]
            seen.append((*stages(message[0]), names))
        asked = one.receive(*answer)
    assert seen == [
        (SECURITY, None, ["AuthMethod"]),
        (SECURITY, None, ["AuthMethod"]),
        (SECURITY, None, ["CHAP_A"]),
        (SECURITY, None, ["CHAP_A", "CHAP_I", "CHAP_C"]),
        (SECURITY, OPERATIONAL, ["CHAP_N", "CHAP_R", "CHAP_I", "CHAP_C"]),
        (SECURITY, OPERATIONAL, ["CHAP_N", "CHAP_R"]),
        (OPERATIONAL, FULL, []),
        (OPERATIONAL, FULL, []),
    ]


@pytest.mark.parametrize(
    "credentials", [Credentials("host", Secret("wrong-wrong-wrong")), Credentials("who", SECRET)]
)
def test_wrong_credentials(credentials: Credentials) -> None:
    one, other = logins.initiator(credentials=credentials), logins.target(accounts=ACCOUNTS)
    with pytest.raises(AuthenticationError, match="check user name and secret") as error:
        logins.login(one, other)
    assert (error.value.status, error.value.exit_status) == (0x0201, 24)
    assert other.failed and not one.done and not other.done
    assert other.problem == "authentication failed: wrong user name or response"
    for secret in (credentials.secret, SECRET, TARGET_SECRET):
        assert secret.reveal() not in str(error.value) + other.problem


def test_one_side_alone_wants_chap() -> None:
    other = logins.target()
    with pytest.raises(AuthenticationError) as error:
        logins.login(logins.initiator(credentials=ONE_WAY), other)
    assert error.value.exit_status == 24 and other.failed
    other = logins.target(accounts=ACCOUNTS)
    with pytest.raises(AuthenticationError, match="none were given: write USER@") as error:
        logins.login(logins.initiator(), other)
    assert error.value.status == 0x0201 and other.failed


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (0, "refused when it was offered CHAP, before it had asked"),
        (1, "agreed to CHAP; it ended the login before its challenge"),
        (2, "check user name and secret"),
    ],
)
def test_an_authentication_failure_says_how_far_the_login_came(steps: int, words: str) -> None:
    """Only behind our response it can be the user name or the secret."""
    one = started()
    for pairs in (CHAP, CHALLENGE)[:steps]:
        one.receive(*response(pairs, SECURITY, None))
    with pytest.raises(AuthenticationError, match=f"authentication failed: .*{words}") as error:
        one.receive(*response(status=0x0201))
    assert ("check user name" in str(error.value)) == (steps == 2)
    assert error.value.status == 0x0201


def test_not_admitted() -> None:
    """0202, which our own target never says."""
    with pytest.raises(LoginError, match="access rules do not admit") as error:
        started().receive(*response(status=0x0202))
    assert error.value.status == 0x0202


def test_refusal_that_says_nothing_else() -> None:
    """tgtd's response, whose ISID and task tag are those of no request."""
    with pytest.raises(AuthenticationError) as error:
        started().receive(*response(status=0x0201, isid=bytes(6), itt=99))
    assert error.value.exit_status == 24


# -- the target is odd ---------------------------------------------------------------------------


def test_a_target_that_takes_its_time() -> None:
    """The target does not grant T at once; CHAP has ended all the same."""
    one = started()
    one.receive(*response(CHAP, SECURITY, None))
    one.receive(*response(CHALLENGE, SECURITY, None))
    (again,) = one.receive(*response(b"", SECURITY, None))
    assert (again[1], stages(again[0])) == (b"", (SECURITY, OPERATIONAL))
    (operational,) = one.receive(*response(b"", SECURITY, OPERATIONAL))
    assert said(operational)["RDMAExtensions"] == "Yes"
    assert one.receive(*response([("RDMAExtensions", "Yes")])) == []
    assert one.done


def test_a_challenge_in_parts() -> None:
    one = started()
    one.receive(*response(CHAP, SECURITY, None))
    long = [*CHALLENGE[:2], ("CHAP_C", "0x" + "a5" * 1024)]
    _, data = response(long, SECURITY, None)
    (empty,) = one.receive(*response(data[:700], SECURITY, None, flags=0x40))
    assert (empty[1], stages(empty[0])) == (b"", (SECURITY, None))
    (proof,) = one.receive(*response(data[700:], SECURITY, None))
    expected = hashlib.md5(b"\x07" + SECRET.reveal().encode() + b"\xa5" * 1024).hexdigest()
    assert said(proof) == {"CHAP_N": "host", "CHAP_R": f"0x{expected}"}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("None", "does not authenticate initiators"),
        ("Reject", "refuses CHAP as a method"),
        ("NotUnderstood", "refuses CHAP as a method"),
        ("Irrelevant", "refuses CHAP as a method"),
    ],
)
@pytest.mark.parametrize("following", [None, OPERATIONAL])
def test_target_without_authentication(method: str, words: str, following: int | None) -> None:
    """With credentials given, AuthMethod=None is refused. Which of the two it is, is said."""
    one = started()
    with pytest.raises(AuthenticationError, match=rf"{words} \(AuthMethod={method}\)") as error:
        one.receive(*response([("AuthMethod", method)], SECURITY, following))
    assert error.value.exit_status == 24


@pytest.mark.parametrize("following", [OPERATIONAL, FULL])
@pytest.mark.parametrize("steps", [0, 1])
def test_target_that_goes_on_too_early(following: int, steps: int) -> None:
    one = started()
    said_so_far = [CHAP, []]
    for pairs in said_so_far[:steps]:
        one.receive(*response(pairs, SECURITY, None))
    pairs = CHAP if steps == 0 else CHALLENGE[:0]
    with pytest.raises((AuthenticationError, RemoteProtocolError)):
        one.receive(*response(pairs, SECURITY, following))
    assert not one.done


def test_target_that_goes_straight_to_the_operational_stage() -> None:
    with pytest.raises(RemoteProtocolError, match="login stage 1"):
        started().receive(*response([("RDMAExtensions", "Yes")]))


def test_target_that_goes_on_without_proof() -> None:
    """Mutual CHAP, and a response with T that has no CHAP_R."""
    one = started(MUTUAL)
    one.receive(*response(CHAP, SECURITY, None))
    one.receive(*response(CHALLENGE, SECURITY, None))
    with pytest.raises(RemoteProtocolError, match="CHAP_N is missing"):
        one.receive(*response(b"", SECURITY, OPERATIONAL))


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [("AuthMethod", "KRB5")],
        [("AuthMethod", "CHAP,None")],
        CHALLENGE,
        CHAP + CHALLENGE,
    ],
)
def test_target_that_answers_something_else(pairs: Pairs) -> None:
    with pytest.raises(RemoteProtocolError):
        started().receive(*response(pairs, SECURITY, None))


@pytest.mark.parametrize("pairs", [CHAP, CHALLENGE, [("CHAP_N", "disk")]])
def test_chap_after_the_security_stage(pairs: Pairs) -> None:
    one = started()
    one.receive(*response(CHAP, SECURITY, None))
    one.receive(*response(CHALLENGE, SECURITY, None))
    one.receive(*response(b"", SECURITY, OPERATIONAL))
    with pytest.raises(RemoteProtocolError):
        one.receive(*response([*pairs, ("RDMAExtensions", "Yes")]))


def test_back_to_the_security_stage() -> None:
    one = started()
    one.receive(*response(CHAP, SECURITY, None))
    one.receive(*response(CHALLENGE, SECURITY, None))
    one.receive(*response(b"", SECURITY, OPERATIONAL))
    with pytest.raises(RemoteProtocolError, match="login stage 0"):
        one.receive(*response(b"", SECURITY, None))


# -- the initiator is odd ------------------------------------------------------------------------


def agreed(other: LoginTarget) -> dict[str, str]:
    """A login that has come as far as the challenge."""
    ask(other, request(WHO + CHAP, SECURITY, OPERATIONAL))
    return said(ask(other, request([("CHAP_A", "5")], SECURITY, OPERATIONAL)))


def proof(challenge: dict[str, str]) -> Pairs:
    octets = bytes([int(challenge["CHAP_I"])]) + SECRET.reveal().encode()
    octets += bytes.fromhex(challenge["CHAP_C"][2:])
    return [("CHAP_N", "host"), ("CHAP_R", "0x" + hashlib.md5(octets).hexdigest())]


def test_t_is_not_granted_before_the_end() -> None:
    """libiscsi asks for the next stage from the first request on, and offers None, too."""
    other = logins.target(accounts=ACCOUNTS)
    method = [("AuthMethod", "CHAP,None")]
    first = ask(other, request(WHO + method, SECURITY, OPERATIONAL))
    assert stages(first[0]) == (SECURITY, None)
    assert said(first) == {"TargetPortalGroupTag": "1", "AuthMethod": "CHAP"}
    second = ask(other, request([("CHAP_A", "5")], SECURITY, FULL))
    assert stages(second[0]) == (SECURITY, None)
    third = ask(other, request(proof(said(second)), SECURITY, OPERATIONAL))
    assert (stages(third[0]), third[1]) == ((SECURITY, OPERATIONAL), b"")
    last = ask(other, request([*WHO, ("RDMAExtensions", "Yes")]))
    assert stages(last[0]) == (OPERATIONAL, FULL) and other.done and other.user == "host"


def test_the_method_and_the_algorithm_at_once() -> None:
    other = logins.target(accounts=ACCOUNTS)
    answer = said(ask(other, request([*WHO, *CHAP, ("CHAP_A", "5")], SECURITY, None)))
    assert answer["AuthMethod"] == "CHAP" and answer["CHAP_A"] == "5"
    last = ask(other, request(proof(answer), SECURITY, None))
    assert stages(last[0]) == (SECURITY, None) and other.user == "host"
    assert stages(ask(other, request([], SECURITY, OPERATIONAL))[0]) == (SECURITY, OPERATIONAL)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (request([*WHO, ("RDMAExtensions", "Yes")]), 0x0201),  # no security stage
        (request(WHO, SECURITY, OPERATIONAL), 0x0201),  # no AuthMethod
        (request(WHO, SECURITY, FULL), 0x0201),
        (request([*WHO, ("AuthMethod", "None")], SECURITY, OPERATIONAL), 0x0201),
        (request([*WHO, ("AuthMethod", "KRB5,None")], SECURITY, OPERATIONAL), 0x0201),
        (request([*WHO, ("CHAP_A", "5")], SECURITY, None), 0x0201),
        (request([*WHO, *CHAP, ("CHAP_A", "1")], SECURITY, None), 0x0201),
        (request([*WHO, *CHAP, ("CHAP_A", "x")], SECURITY, None), 0x0200),
        (request([*WHO, *CHAP, ("CHAP_N", "x")], SECURITY, None), 0x0200),
        (request([*WHO, *CHAP, ("CHAP_X", "x")], SECURITY, None), 0x0200),
    ],
)
def test_first_requests_that_are_refused(message: tuple[bytes, bytes], expected: int) -> None:
    other = logins.target(accounts=ACCOUNTS)
    assert status(ask(other, message)) == expected
    assert other.failed and not other.done


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], 0x0207),
        ([("CHAP_N", "host")], 0x0207),
        ([("CHAP_R", "0x00")], 0x0207),
        ([("CHAP_N", "host"), ("CHAP_R", "0x" + "00" * 16)], 0x0201),
        ([("CHAP_N", "host"), ("CHAP_R", "Reject")], 0x0200),
        ([("CHAP_N", "host"), ("CHAP_R", "0x" + "00" * 1025)], 0x0200),
        ([("CHAP_A", "6")], 0x0200),
    ],
)
def test_responses_that_are_refused(pairs: Pairs, expected: int) -> None:
    other = logins.target(accounts=ACCOUNTS)
    agreed(other)
    assert status(ask(other, request(pairs, SECURITY, OPERATIONAL))) == expected
    assert other.failed and not other.done and other.user == ""


def test_our_own_challenge_is_not_responded_to() -> None:
    other = logins.target(accounts=ACCOUNTS)
    challenge = agreed(other)
    pairs = [*proof(challenge), ("CHAP_I", "1"), ("CHAP_C", challenge["CHAP_C"])]
    answer = ask(other, request(pairs, SECURITY, OPERATIONAL))
    assert (status(answer), answer[1]) == (0x0201, b"")


def test_a_target_without_accounts_knows_no_chap() -> None:
    other = logins.target()
    answer = said(ask(other, request([*WHO, ("CHAP_A", "5")], SECURITY, OPERATIONAL)))
    assert answer["CHAP_A"] == "NotUnderstood"


keys_and_values = st.tuples(
    st.sampled_from(["AuthMethod", *(f"CHAP_{letter}" for letter in "AICNR"), "RDMAExtensions"]),
    st.sampled_from(["CHAP", "None", "5", "8", "host", "Yes", "0x00", "0x" + "a5" * 32, "0b"]),
)
texts = st.lists(keys_and_values, max_size=4, unique_by=lambda pair: pair[0])
requests = st.lists(
    st.tuples(texts, st.sampled_from([0, 1]), st.sampled_from([None, 1, 3])), max_size=6
)


@given(requests)
def test_nobody_gets_in_without_the_secret(messages: list[tuple[Pairs, int, int | None]]) -> None:
    other = logins.target(accounts=ACCOUNTS)
    for index, (pairs, stage, following) in enumerate(messages):
        who = WHO if index == 0 else []
        (answer,) = other.receive(*request([*who, *pairs], stage, following))
        if other.failed:
            assert status(answer) >> 8 == 2
            break
        assert stages(answer[0]) == (SECURITY, None)
    assert not other.done and other.user == ""


@given(requests)
def test_no_target_gets_past_mutual_chap(messages: list[tuple[Pairs, int, int | None]]) -> None:
    one = started(MUTUAL)
    for pairs, stage, following in messages:
        try:
            asked = one.receive(*response(pairs, stage, following))
        except (RemoteProtocolError, AuthenticationError) as error:
            assert SECRET.reveal() not in str(error)
            break
        assert all(stages(message[0])[0] == SECURITY for message in asked)
    assert not one.done


class OldTarget:
    """What LIO did before Linux 3.15, and Synology's did in 2019: it compares the beginning of the
    key with CHAP_A=5, and ends the login where that is not so."""

    def __init__(self, refusal: int) -> None:
        self.refusal = refusal

    def answer(self, asked: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        if asked[1].startswith(b"CHAP_A=5"):
            return response(CHALLENGE, SECURITY, None)
        if b"CHAP_A=" in asked[1]:
            return response(status=self.refusal)
        return response(CHAP, SECURITY, None)


@pytest.mark.parametrize("refusal", [0x0201, 0x0200, 0x0300])
def test_a_target_that_looks_at_the_first_algorithm_only(refusal: int) -> None:
    """The error says what helps, and that does; nothing is tried that was not asked for."""
    old = OldTarget(refusal)
    one = started()
    (offer,) = one.receive(*old.answer(request(WHO + CHAP)))
    with pytest.raises(LoginError, match="auth=md5") as error:
        one.receive(*old.answer(offer))
    assert error.value.status == refusal
    assert "\n" not in str(error.value) and SECRET.reveal() not in str(error.value)

    one = started(Credentials("host", SECRET, algorithms=(chap.MD5,)))
    (offer,) = one.receive(*old.answer(request(WHO + CHAP)))
    (answer,) = one.receive(*old.answer(offer))
    assert set(said(answer)) == {"CHAP_N", "CHAP_R"}
    assert one.hint == ""


@pytest.mark.parametrize("word", ["Reject", "NotUnderstood"])
def test_a_target_that_answers_no_algorithm(word: str) -> None:
    one = started()
    one.receive(*response(CHAP, SECURITY, None))
    with pytest.raises(AuthenticationError, match="auth=md5"):
        one.receive(*response([("CHAP_A", word)], SECURITY, None))


def test_what_would_not_help_is_not_said() -> None:
    """auth=md5 is not advised before CHAP began, after the challenge, or where auth= was given."""
    one = started()
    with pytest.raises(AuthenticationError) as error:
        one.receive(*response(status=0x0201))
    assert "auth=" not in str(error.value)
    one = started()
    one.receive(*response(CHAP, SECURITY, None))
    one.receive(*response(CHALLENGE, SECURITY, None))
    with pytest.raises(AuthenticationError) as error:
        one.receive(*response(status=0x0201))
    assert "auth=" not in str(error.value)
    one = started(Credentials("host", SECRET, algorithms=(chap.SHA256,)))
    one.receive(*response(CHAP, SECURITY, None))
    with pytest.raises(AuthenticationError, match="algorithm of CHAP that auth= asks for"):
        one.receive(*response(status=0x0201))


def test_md5_is_offered_behind_better_ones() -> None:
    """Targets take the first algorithm that they know."""
    assert chap.OFFER.index(chap.MD5) > chap.OFFER.index(chap.SHA3_256)
    assert chap.OFFER[0] != chap.MD5


def test_the_algorithms_can_be_chosen() -> None:
    one = started(Credentials("host", SECRET, algorithms=(chap.SHA256,)))
    (asked,) = one.receive(*response(CHAP, SECURITY, None))
    assert said(asked) == {"CHAP_A": "7"}


def test_the_user_that_a_request_claims_is_known_before_it_is_taken() -> None:
    """In parts, too (C bit); without a response there is none. The look changes nothing."""
    other = logins.target(accounts=ACCOUNTS)
    for pairs in (WHO + CHAP, [("CHAP_A", "5")]):
        message = logins.request(pairs, SECURITY, None)
        assert other.claimed_user(*message) == ""
        ask(other, message)
    header, first = logins.request(b"CHAP_N=ho", SECURITY, None)
    part = (bytes([header[0], header[1] | bhs.FLAG_CONTINUE]) + header[2:], first)
    assert other.claimed_user(*part) == ""
    ask(other, part)
    rest = logins.request(b"st\0CHAP_R=0x00\0", SECURITY, OPERATIONAL)
    for _ in range(2):
        assert other.claimed_user(*rest) == "host"
    assert other.claimed_user(*logins.request(b"st\0no pair\0", SECURITY, None)) == ""
    assert status(ask(other, rest)) == 0x0201
    assert logins.target().claimed_user(*rest) == ""
