"""Text data segments: key=value pairs, each ended by a NUL (RFC 7143 section 6.1)."""

from __future__ import annotations

from collections.abc import Iterable

from iserblk.errors import RemoteProtocolError

MAXIMUM_TEXT = 64 * 1024  # bytes of one negotiation step, all its PDUs together
MAXIMUM_PAIRS = 256  # far more than all standards together define
_MAXIMUM_KEY = 63
_MAXIMUM_VALUE = 8192  # bytes; the standard allows 255; values of CHAP and lists may be longer
_KEY_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-+@_#")
_REPEATABLE = ("TargetName", "TargetAddress")  # in answers to SendTargets, and redirections


def encode(pairs: Iterable[tuple[str, str]]) -> bytes:
    """The bytes of a text."""
    return b"".join(f"{key}={value}".encode() + b"\0" for key, value in pairs)


def decode_untrusted(
    data: bytes | memoryview, most: int = MAXIMUM_TEXT, most_pairs: int = MAXIMUM_PAIRS
) -> list[tuple[str, str]]:
    """The pairs of a complete text, in order. Raises RemoteProtocolError for bytes that are not a
    text, and for more than ``most`` bytes or ``most_pairs`` pairs.

    Only TargetName and TargetAddress may come twice. Tolerated, because some peers send them: NULs
    of padding, and a last pair without its NUL.
    """
    if len(data) > most:
        raise RemoteProtocolError("iSCSI", f"a text of {len(data)} bytes")
    pairs: list[tuple[str, str]] = []
    seen: set[str] = set()
    for item in bytes(data).split(b"\0"):
        if not item:
            continue
        raw_key, separator, raw_value = item.partition(b"=")
        try:
            key, value = raw_key.decode("ascii"), raw_value.decode("utf-8")
        except UnicodeDecodeError:
            raise RemoteProtocolError("iSCSI", f"text that is not UTF-8: {item[:40]!r}") from None
        if not separator or not 0 < len(key) <= _MAXIMUM_KEY or not set(key) <= _KEY_CHARACTERS:
            raise RemoteProtocolError("iSCSI", f"text that is no key=value pair: {item[:40]!r}")
        if len(raw_value) > _MAXIMUM_VALUE:
            raise RemoteProtocolError("iSCSI", f"a value of {len(raw_value)} bytes for {key}")
        if key in seen and key not in _REPEATABLE:
            raise RemoteProtocolError("iSCSI", f"{key} was given twice")
        if len(pairs) == most_pairs:
            raise RemoteProtocolError("iSCSI", f"a text of more than {most_pairs} keys")
        seen.add(key)
        pairs.append((key, value))
    return pairs


class Collector:
    """Joins the PDUs of one negotiation step (C bit), up to MAXIMUM_TEXT bytes."""

    def __init__(self) -> None:
        self._parts = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        """Add the data of one PDU. Raises RemoteProtocolError for more than MAXIMUM_TEXT bytes in
        all."""
        if len(self._parts) + len(data) > MAXIMUM_TEXT:
            raise RemoteProtocolError("iSCSI", f"a text of more than {MAXIMUM_TEXT} bytes")
        self._parts += data

    def look(self, data: bytes | memoryview) -> list[tuple[str, str]]:
        """The pairs that the text would have with the data of a last PDU, which is not added.
        Raises RemoteProtocolError."""
        if len(self._parts) + len(data) > MAXIMUM_TEXT:
            raise RemoteProtocolError("iSCSI", f"a text of more than {MAXIMUM_TEXT} bytes")
        return decode_untrusted(bytes(self._parts) + bytes(data))

    def take(self) -> list[tuple[str, str]]:
        """The pairs of the complete text, after its last PDU. The collector is empty then. Raises
        RemoteProtocolError."""
        whole = bytes(self._parts)
        self._parts.clear()
        return decode_untrusted(whole)
