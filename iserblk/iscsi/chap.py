"""CHAP, both sides, one-way and mutual (RFC 1994; RFC 7143 sections 9.2.1 and 12.1.3).

    initiator                                   target
    CHAP_A=<list>                          →
                                           ←    CHAP_A=<one> CHAP_I CHAP_C
    CHAP_N CHAP_R [CHAP_I CHAP_C]          →                            [mutual]
                                           ←    [CHAP_N CHAP_R]

R is the digest of identifier, secret and challenge. No I/O, and nothing of the login around it:
pairs of text in, pairs of text out. The values come from the network: they raise
RemoteProtocolError, or AuthenticationError where they are well formed and wrong. No error says
anything of a secret, a challenge or a response.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from iserblk.errors import AuthenticationError, BadArgument, RemoteProtocolError
from iserblk.secret import Secret

MD5, SHA1, SHA256, SHA3_256 = 5, 6, 7, 8
_HASHES = {MD5: "md5", SHA1: "sha1", SHA256: "sha256", SHA3_256: "sha3_256"}
# What is offered, in order of preference. SHA-256 is last: tgtd takes its number for SHA-1, and
# must have found MD5 before. All four hide the secret alike. MD5 is not first, although that is all
# that LIO before Linux 3.15, and Synology's, look at: current targets take the first that they
# know, and would all take it. Nor is MD5 alone offered after a refusal: an attacker who can forge
# one would choose the algorithm.
OFFER = (SHA3_256, SHA1, MD5, SHA256)

MAXIMUM_BINARY = 1024  # bytes of a challenge or response
MAXIMUM_NAME = 255  # bytes; a text-value (section 6.1)
_CHALLENGE = 32  # bytes of ours: no shorter than any digest
_LEAST_CHALLENGE = 4  # bytes that we respond to: less is no challenge, but a question

_HEX = re.compile("[0-9a-fA-F]+")
_NUMBER = re.compile("0|[1-9][0-9]{0,9}|0[xX][0-9a-fA-F]{1,8}")

Pairs = list[tuple[str, str]]
Random = Callable[[int], bytes]


class MissingKey(RemoteProtocolError):
    """A key that this step must have is not there."""

    def __init__(self, name: str) -> None:
        super().__init__("iSCSI", f"{name} is missing in CHAP")


@dataclass(slots=True, frozen=True)
class Credentials:
    """Of an initiator: its own, and for mutual CHAP those that the target must prove.

    ``target_user`` "": the target may call itself as it likes. Mutual when ``target_secret`` is
    not empty. Raises BadArgument for what must not be used.
    """

    user: str
    secret: Secret
    target_user: str = ""
    target_secret: Secret = field(default_factory=Secret)
    algorithms: tuple[int, ...] = OFFER

    def __post_init__(self) -> None:
        if not self.user or not self.secret:
            raise BadArgument("CHAP needs a user name and a secret")
        for name in (self.user, self.target_user):
            check_name(name)
        if self.target_user and not self.target_secret:
            raise BadArgument("mutual CHAP: the target's user name is given without its secret")
        if self.target_secret and self.target_secret == self.secret:
            raise BadArgument("mutual CHAP: both secrets are the same; each side needs its own")


@dataclass(slots=True, frozen=True)
class Accounts:
    """Of a target: the secrets of initiators by user name; for mutual CHAP ``user`` and ``secret``
    of its own. Raises BadArgument for what must not be used."""

    secrets: Mapping[str, Secret]
    user: str = ""
    secret: Secret = field(default_factory=Secret)

    def __post_init__(self) -> None:
        if not self.secrets or not all(self.secrets.values()):
            raise BadArgument("CHAP needs accounts, each with a secret")
        if bool(self.user) != bool(self.secret):
            raise BadArgument("mutual CHAP needs both a user name and a secret of the target")
        for name in (*self.secrets, self.user):
            check_name(name)
        if any(secret == self.secret for secret in self.secrets.values()):
            raise BadArgument(
                "mutual CHAP: the target's secret is that of an account, too; each needs its own"
            )


def check_name(name: str) -> None:
    """Raises BadArgument for a user name that cannot be sent."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise BadArgument("CHAP: a user name is UTF-8") from None
    if length > MAXIMUM_NAME or "\0" in name:
        raise BadArgument(f"CHAP: a user name has at most {MAXIMUM_NAME} bytes, and no NUL")


# -- values --------------------------------------------------------------------------------------


def encode_binary(data: bytes, base_64: bool = False) -> str:
    return f"0b{base64.b64encode(data).decode()}" if base_64 else f"0x{data.hex()}"


def decode_binary_untrusted(text: str, name: str) -> bytes:
    """A binary-value (section 6.1), 1 to 1,024 bytes. Raises RemoteProtocolError."""
    kind, digits = text[:2].lower(), text[2:]
    data = b""
    if kind == "0x" and _HEX.fullmatch(digits) and len(digits) <= 2 * MAXIMUM_BINARY:
        data = bytes.fromhex(digits if len(digits) % 2 == 0 else f"0{digits}")
    elif kind == "0b" and digits.isascii() and len(digits) <= 2 * MAXIMUM_BINARY:
        try:
            # Peers leave the padding out.
            unpadded = digits.rstrip("=")
            data = base64.b64decode(unpadded + "=" * (-len(unpadded) % 4), validate=True)
        except binascii.Error:
            data = b""
    if not 1 <= len(data) <= MAXIMUM_BINARY:
        raise RemoteProtocolError("iSCSI", f"{name} is no binary value of 1 to 1024 bytes")
    return data


def decode_number_untrusted(text: str, name: str, high: int) -> int:
    """A numerical-value of 0 to ``high``. Raises RemoteProtocolError."""
    value = high + 1
    if _NUMBER.fullmatch(text):
        value = int(text, 16 if text[:2] in ("0x", "0X") else 10)
    if value > high:
        raise RemoteProtocolError("iSCSI", f"{name} is no number from 0 to {high}")
    return value


def _octets(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def response(algorithm: int, identifier: int, secret: Secret, challenge: bytes) -> bytes:
    """CHAP_R (RFC 1994 section 4.1)."""
    digest = hashlib.new(_HASHES[algorithm], usedforsecurity=False)
    digest.update(bytes((identifier,)) + _octets(secret.reveal()) + challenge)
    return digest.digest()


def _only(pairs: Pairs, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[str]:
    """The values of ``required`` and ``optional`` in order, "" for what is not there. Raises
    RemoteProtocolError for a key that is not of this step, MissingKey."""
    given = dict(pairs)
    for name in given:
        if name not in required + optional:
            raise RemoteProtocolError("iSCSI", f"{name[:63]} does not belong to this step of CHAP")
    for name in required:
        if not given.get(name):
            raise MissingKey(name)
    return [given.get(name, "") for name in required + optional]


def is_key(name: str) -> bool:
    return name.startswith("CHAP_")


# -- the initiator -------------------------------------------------------------------------------


class ChapInitiator:
    """Call ``start`` when the target has chosen CHAP, then ``receive`` with the CHAP keys of each
    response, until ``done``: the target takes us for the user, and has proved itself if it had to.

    ``offered``: algorithms are. ``responded``: our response is out, and the login may ask to go on.
    """

    def __init__(self, credentials: Credentials, random: Random = secrets.token_bytes) -> None:
        self._credentials = credentials
        self._random = random
        self._own = b""  # what the target must answer with to be who it is
        self._reflected = b""  # what it answers with when it has our secret instead
        self.offered = False
        self.responded = False
        self.done = False

    def start(self) -> Pairs:
        self.offered = True
        offer = ",".join(str(algorithm) for algorithm in self._credentials.algorithms)
        return [("CHAP_A", offer)]

    def receive(self, pairs: Pairs) -> Pairs:
        """Raises RemoteProtocolError, AuthenticationError: close the connection."""
        if self.done:
            _only(pairs, ())
            return []
        return self._verify(pairs) if self.responded else self._respond(pairs)

    def _respond(self, pairs: Pairs) -> Pairs:
        chosen, number, binary = _only(pairs, ("CHAP_A", "CHAP_I", "CHAP_C"))
        given = self._credentials
        algorithm = decode_number_untrusted(chosen, "CHAP_A", 255)
        if algorithm not in given.algorithms:
            raise RemoteProtocolError("iSCSI", f"CHAP_A={algorithm} was not offered")
        identifier = decode_number_untrusted(number, "CHAP_I", 255)
        challenge = decode_binary_untrusted(binary, "CHAP_C")
        if len(challenge) < _LEAST_CHALLENGE:
            raise RemoteProtocolError("iSCSI", f"CHAP_C has {len(challenge)} bytes")
        # In the encoding that the target uses itself.
        base_64 = binary[:2].lower() == "0b"
        ours = response(algorithm, identifier, given.secret, challenge)
        answers = [("CHAP_N", given.user), ("CHAP_R", encode_binary(ours, base_64))]
        self.responded = True
        if not given.target_secret:
            self.done = True
            return answers
        mine = _fresh(self._random, challenge)
        number_of_mine = self._random(1)[0]
        self._own = response(algorithm, number_of_mine, given.target_secret, mine)
        self._reflected = response(algorithm, number_of_mine, given.secret, mine)
        answers += [("CHAP_I", str(number_of_mine)), ("CHAP_C", encode_binary(mine, base_64))]
        return answers

    def _verify(self, pairs: Pairs) -> Pairs:
        name, binary = _only(pairs, ("CHAP_N", "CHAP_R"))
        theirs = decode_binary_untrusted(binary, "CHAP_R")
        right = hmac.compare_digest(theirs, self._own)
        if hmac.compare_digest(theirs, self._reflected):
            raise AuthenticationError(
                "the target has our own secret for its own; each side needs its own"
            )
        wanted = self._credentials.target_user
        if not right or (wanted and not hmac.compare_digest(_octets(name), _octets(wanted))):
            raise AuthenticationError(
                "the target did not prove who it is: check its user name and secret"
            )
        self.done = True
        return []


def _fresh(random: Random, other: bytes) -> bytes:
    """A challenge that is not ``other``."""
    while True:
        challenge = random(_CHALLENGE)
        if challenge != other:
            return challenge


# -- the target ----------------------------------------------------------------------------------


class ChapTarget:
    """Call ``receive`` with the CHAP keys of each request, until ``done``; then ``user`` is who
    the initiator is."""

    def __init__(self, accounts: Accounts, random: Random = secrets.token_bytes) -> None:
        self._accounts = accounts
        self._random = random
        self._algorithm = 0  # 0: not chosen yet
        self._identifier = 0
        self._challenge = b""
        self.user = ""
        self.done = False

    def receive(self, pairs: Pairs) -> Pairs:
        """Raises RemoteProtocolError (MissingKey), AuthenticationError: the login fails."""
        if self.done:
            _only(pairs, ())
            return []
        return self._verify(pairs) if self._algorithm else self._challenge_them(pairs)

    def _challenge_them(self, pairs: Pairs) -> Pairs:
        (offer,) = _only(pairs, ("CHAP_A",))
        for item in offer.split(",")[:32]:
            algorithm = decode_number_untrusted(item, "CHAP_A", 0xFFFFFFFF)
            if algorithm in _HASHES:
                break
        else:
            raise AuthenticationError("no algorithm of CHAP that we have was offered")
        self._algorithm = algorithm
        self._identifier = self._random(1)[0]
        self._challenge = self._random(_CHALLENGE)
        return [
            ("CHAP_A", str(algorithm)),
            ("CHAP_I", str(self._identifier)),
            ("CHAP_C", encode_binary(self._challenge)),
        ]

    def _verify(self, pairs: Pairs) -> Pairs:
        name, binary, number, challenge = _only(
            pairs, ("CHAP_N", "CHAP_R"), ("CHAP_I", "CHAP_C")
        )  # fmt: skip
        theirs = decode_binary_untrusted(binary, "CHAP_R")
        mutual = bool(number or challenge)
        identifier, asked = 0, b""
        if mutual:
            identifier = decode_number_untrusted(number, "CHAP_I", 255)
            asked = decode_binary_untrusted(challenge, "CHAP_C")
            if hmac.compare_digest(asked, self._challenge):
                raise AuthenticationError("the initiator sent our own challenge back")
        accounts = self._accounts
        # An unknown user costs as much time as a known one.
        known = name in accounts.secrets
        secret = accounts.secrets.get(name) or Secret(self._random(_CHALLENGE).hex())
        right = hmac.compare_digest(theirs, self._respond_to(secret))
        if not known or not right:
            raise AuthenticationError("wrong user name or response")
        if accounts.secret and hmac.compare_digest(theirs, self._respond_to(accounts.secret)):
            raise AuthenticationError("the initiator has our own secret for its own")
        if mutual and not accounts.secret:
            raise AuthenticationError("the initiator wants mutual CHAP, and we have no secret")
        self.user = name
        self.done = True
        if not mutual:
            return []
        ours = response(self._algorithm, identifier, accounts.secret, asked)
        base_64 = challenge[:2].lower() == "0b"
        return [("CHAP_N", accounts.user), ("CHAP_R", encode_binary(ours, base_64))]

    def _respond_to(self, secret: Secret) -> bytes:
        return response(self._algorithm, self._identifier, secret, self._challenge)
