"""CHAP, both sides, one-way and mutual (RFC 1994; RFC 7143 sections 9.2.1 and 12.1.3).

    initiator                                   target
    CHAP_A=<list>                          →
                                           ←    CHAP_A=<one> CHAP_I CHAP_C
    CHAP_N CHAP_R [CHAP_I CHAP_C]          →                            [mutual]
                                           ←    [CHAP_N CHAP_R]

R is the digest of identifier, secret and challenge. This module does no I/O and knows nothing of
the login around CHAP: it takes pairs of text and returns pairs of text. Malformed values from the
network raise RemoteProtocolError, wrong ones AuthenticationError. No error text contains a secret,
a challenge or a response.
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

MD5 = 5
SHA1 = 6
SHA256 = 7
SHA3_256 = 8
_HASHES = {MD5: "md5", SHA1: "sha1", SHA256: "sha256", SHA3_256: "sha3_256"}
# The offer, in order of preference. SHA-256 is last: tgtd takes its number for SHA-1, and must find
# MD5 before it. All four protect the secret equally well. MD5 is not first, although LIO before
# Linux 3.15 and Synology look at the first algorithm only: current targets take the first algorithm
# that they know, and would all take MD5. Nor is MD5 alone offered after a refusal: an attacker who
# can forge a refusal would then choose the algorithm.
OFFER = (SHA3_256, SHA1, MD5, SHA256)

MAXIMUM_BINARY = 1024  # bytes of a challenge or response
MAXIMUM_NAME = 255  # bytes; a text-value (section 6.1)
_CHALLENGE = 32  # bytes of our challenges: no shorter than any digest
_LEAST_CHALLENGE = 4  # bytes: a shorter challenge of a target is refused

_HEX = re.compile("[0-9a-fA-F]+")
_NUMBER = re.compile("0|[1-9][0-9]{0,9}|0[xX][0-9a-fA-F]{1,8}")

Pairs = list[tuple[str, str]]
Random = Callable[[int], bytes]


class MissingKey(RemoteProtocolError):
    """A key that this step of CHAP requires is missing."""

    def __init__(self, name: str) -> None:
        super().__init__("iSCSI", f"{name} is missing in CHAP")


@dataclass(slots=True, frozen=True)
class Credentials:
    """The credentials of an initiator, and for mutual CHAP those that the target must prove.

    CHAP is mutual when ``target_secret`` is not empty. ``target_user`` "": the target may give any
    user name. Raises BadArgument for values that must not be used.
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
    """The accounts of a target: the secrets of initiators by user name. For mutual CHAP also the
    ``user`` and ``secret`` of the target. Raises BadArgument for values that must not be used."""

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
                "mutual CHAP: an account has the same secret as the target; each needs its own"
            )


def check_name(name: str) -> None:
    """Check a user name. Raises BadArgument when it cannot be sent."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise BadArgument("CHAP: a user name is UTF-8") from None
    if length > MAXIMUM_NAME or "\0" in name:
        raise BadArgument(f"CHAP: a user name has at most {MAXIMUM_NAME} bytes, and no NUL")


# -- values --------------------------------------------------------------------------------------


def encode_binary(data: bytes, base_64: bool = False) -> str:
    """A binary-value (section 6.1): hexadecimal, or base64."""
    return f"0b{base64.b64encode(data).decode()}" if base_64 else f"0x{data.hex()}"


def decode_binary_untrusted(text: str, name: str) -> bytes:
    """The bytes of a binary-value (section 6.1), 1 to 1,024 of them. Raises
    RemoteProtocolError."""
    kind, digits = text[:2].lower(), text[2:]
    data = b""
    if kind == "0x" and _HEX.fullmatch(digits) and len(digits) <= 2 * MAXIMUM_BINARY:
        data = bytes.fromhex(digits if len(digits) % 2 == 0 else f"0{digits}")
    elif kind == "0b" and digits.isascii() and len(digits) <= 2 * MAXIMUM_BINARY:
        try:
            # Some peers leave the padding out.
            unpadded = digits.rstrip("=")
            data = base64.b64decode(unpadded + "=" * (-len(unpadded) % 4), validate=True)
        except binascii.Error:
            data = b""
    if not 1 <= len(data) <= MAXIMUM_BINARY:
        raise RemoteProtocolError("iSCSI", f"{name} is no binary value of 1 to 1024 bytes")
    return data


def decode_number_untrusted(text: str, name: str, high: int) -> int:
    """The value of a numerical-value from 0 to ``high``. Raises RemoteProtocolError."""
    value = high + 1
    if _NUMBER.fullmatch(text):
        value = int(text, 16 if text[:2] in ("0x", "0X") else 10)
    if value > high:
        raise RemoteProtocolError("iSCSI", f"{name} is no number from 0 to {high}")
    return value


def _octets(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def response(algorithm: int, identifier: int, secret: Secret, challenge: bytes) -> bytes:
    """The bytes of CHAP_R (RFC 1994 section 4.1)."""
    digest = hashlib.new(_HASHES[algorithm], usedforsecurity=False)
    digest.update(bytes((identifier,)) + _octets(secret.reveal()) + challenge)
    return digest.digest()


def _only(pairs: Pairs, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[str]:
    """The values of ``required`` and ``optional`` keys in order, "" for a missing optional key.
    Raises MissingKey, and RemoteProtocolError for a key that does not belong to this step."""
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
    """The initiator's side of CHAP, in one login.

    Call ``start`` when the target has chosen CHAP, then ``receive`` with the CHAP keys of each
    response, until ``done``: our response has been given, and in mutual CHAP the target has proved
    who it is. ``offered``: our algorithms have been given. ``responded``: our response has been
    given, and the login may ask for the next stage.
    """

    def __init__(self, credentials: Credentials, random: Random = secrets.token_bytes) -> None:
        self._credentials = credentials
        self._random = random
        self._own = b""  # the response that proves who the target is
        self._reflected = b""  # the response of a target that uses our secret as its own
        self.offered = False
        self.responded = False
        self.done = False
        self.algorithm = ""  # that the target has chosen, as users write it

    def start(self) -> Pairs:
        """Returns the first keys to send."""
        self.offered = True
        offer = ",".join(str(algorithm) for algorithm in self._credentials.algorithms)
        return [("CHAP_A", offer)]

    def receive(self, pairs: Pairs) -> Pairs:
        """Take the CHAP keys of a response; returns the keys to send next.

        Raises RemoteProtocolError or AuthenticationError; then the connection is to be closed."""
        if self.done:
            _only(pairs, ())
            return []
        return self._verify(pairs) if self.responded else self._respond(pairs)

    @property
    def mutual(self) -> bool:
        return bool(self._credentials.target_secret)

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
        # Our values have the encoding that the target uses.
        base_64 = binary[:2].lower() == "0b"
        ours = response(algorithm, identifier, given.secret, challenge)
        answers = [("CHAP_N", given.user), ("CHAP_R", encode_binary(ours, base_64))]
        self.responded = True
        self.algorithm = _HASHES[algorithm].replace("_", "-")
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
                "the target has our own secret as its secret; each side needs its own"
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
    """The target's side of CHAP, in one login.

    Call ``receive`` with the CHAP keys of each request, until ``done``. Then ``user`` is the user
    name that the initiator has proved."""

    def __init__(self, accounts: Accounts, random: Random = secrets.token_bytes) -> None:
        self._accounts = accounts
        self._random = random
        self._algorithm = 0  # 0: not chosen yet
        self._identifier = 0
        self._challenge = b""
        # An unknown user costs as much time as a known one: a secret is there, and as long.
        length = len(_octets(next(iter(accounts.secrets.values())).reveal()))
        self._nobody = Secret(secrets.token_urlsafe(length)[:length])
        self.user = ""
        self.done = False

    def receive(self, pairs: Pairs) -> Pairs:
        """Take the CHAP keys of a request; returns the keys to send next.

        Raises RemoteProtocolError (MissingKey is one) or AuthenticationError; then the login has
        failed."""
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
            raise AuthenticationError("the initiator offers no algorithm of CHAP that we have")
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
        known = name in accounts.secrets
        secret = accounts.secrets.get(name, self._nobody)
        right = hmac.compare_digest(theirs, self._respond_to(secret))
        if not known or not right:
            raise AuthenticationError("wrong user name or response")
        if accounts.secret and hmac.compare_digest(theirs, self._respond_to(accounts.secret)):
            raise AuthenticationError("the initiator has our own secret as its secret")
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
