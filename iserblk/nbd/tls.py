"""TLS of an NBD server: contexts from the files that NBD programs share, and a socket behind it.

A directory with certificates has ``ca-cert.pem``, ``server-cert.pem``, ``server-key.pem`` and
perhaps ``ca-crl.pem``; a file with pre-shared keys has lines ``user:key`` in hexadecimal digits.
These are the names that nbdkit, qemu and libnbd use.
"""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path
from typing import Any

from iserblk.credentials import read_private
from iserblk.errors import BadArgument, NotSupported
from iserblk.sockets.wire import WOULD_BLOCK, Wire

_CA, _REVOKED = "ca-cert.pem", "ca-crl.pem"
_CERTIFICATE, _KEY = "server-cert.pem", "server-key.pem"
_STEP = 64 << 10  # bytes of TLS records that are read, or made, at once
_RECORDS = memoryview(bytearray(_STEP))  # on their way from the socket to OpenSSL
_MOST_READS = 4  # of that, for the first byte of data: a client could send records without any


def by_certificates(directory: str, verify_peer: bool) -> ssl.SSLContext:
    """``verify_peer``: clients have to show a certificate that the CA has signed. Raises
    BadArgument naming the file."""
    place = Path(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name in (_CA, _CERTIFICATE, _KEY):
        if not (place / name).is_file():
            raise BadArgument(f"--tls-certificates {directory}: it has no {name}")
    files = f"{_CERTIFICATE}, {_KEY}"  # for the text of an error
    try:
        context.load_cert_chain(place / _CERTIFICATE, place / _KEY, _no_pass_phrase)
        files = _CA
        context.load_verify_locations(place / files)
        if (place / _REVOKED).is_file():
            files = _REVOKED
            context.load_verify_locations(place / files)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    except OSError as error:  # also of ssl
        reason = getattr(error, "reason", None) or error.strerror or error
        raise BadArgument(f"--tls-certificates {directory}: {files}: {reason}") from None
    if verify_peer:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_pass_phrase() -> str:
    """(Without this, the terminal is asked.)"""
    raise BadArgument(f"--tls-certificates: {_KEY} is encrypted; give a key without a pass phrase")


def by_keys(path: str) -> ssl.SSLContext:
    """Raises BadArgument naming the file; NotSupported where Python's ssl has no pre-shared
    keys (before 3.13)."""
    if not hasattr(ssl.SSLContext, "set_psk_server_callback"):
        raise NotSupported(
            "--tls-psk: this Python has no pre-shared keys (3.13 has); use --tls-certificates, or "
            "--nbdkit with nbdkit's own --tls-psk"
        )
    keys = _keys(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHEPSK:DHEPSK:PSK")
    set_callback = getattr(context, "set_psk_server_callback")  # noqa: B009 (not in 3.11)
    set_callback(lambda identity: keys.get(identity or "", b""))
    return context


def _keys(path: str) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    content = read_private(path, f"--tls-psk {path}").decode(errors="surrogateescape")
    for number, line in enumerate(content.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        user, colon, digits = line.rpartition(":")
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if not colon or not user or not key:
            raise BadArgument(f"--tls-psk {path}: line {number} is not user:hexadecimal-key")
        keys[user] = key
    if not keys:
        raise BadArgument(f"--tls-psk {path}: it has no keys")
    return keys


class TlsStream:
    """Implements Stream behind TLS, whose handshake is done by ``shake_hands``.

    Raises OSError as the socket does; ssl.SSLError, which is one, where the client breaks TLS. Of
    one thread: all streams share the memory through which records come.
    """

    def __init__(self, wire: Wire, context: ssl.SSLContext) -> None:
        self._wire = wire
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._unsent: bytes = b""  # records
        self._decrypted = False  # there may be more of what has been received

    def shake_hands(self) -> bool:
        """True when TLS has begun. False: call ``flush``, and again when bytes have come."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                if not self._read_records():
                    return False
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self.flush()  # the alert that tells the client why
                raise
            else:
                self.flush()
                return True

    def _read_records(self) -> bool:
        count = self._wire.receive([_RECORDS])
        if count == WOULD_BLOCK:
            return False
        if count:
            self._in.write(_RECORDS[:count])
        else:
            self._in.write_eof()
        return True

    def receive(self, buffers: list[memoryview]) -> int:
        buffer: Any = buffers[0]  # the types of older mypy know bytearray only
        reads = 0
        while True:
            try:
                count = int(self._tls.read(len(buffer), buffer))
            except ssl.SSLWantReadError:
                self._decrypted = False
                # Records need not have data. What is left in the socket is still to be seen there.
                if reads == _MOST_READS or not self._read_records():
                    return WOULD_BLOCK
                reads += 1
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            else:
                self._decrypted = True
                return count

    def pending(self) -> bool:
        """``receive`` may have something that the socket does not show."""
        return self._decrypted

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        if not self.flush():
            return WOULD_BLOCK
        taken = 0
        for buffer in buffers:
            self._tls.write(buffer)
            taken += len(buffer)
            if self._out.pending >= _STEP:
                break
        self.flush()
        return taken

    def flush(self) -> bool:
        """Send what ``send`` has taken and kept; whether nothing is left."""
        while True:
            if not self._unsent:
                self._unsent = self._out.read()
                if not self._unsent:
                    return True
            count = self._wire.send([self._unsent], len(self._unsent))
            if count == WOULD_BLOCK:
                return False
            self._unsent = self._unsent[count:]

    def keeps(self) -> bool:
        """``send`` has taken something that has not left."""
        return bool(self._unsent) or self._out.pending > 0

    def close_notify(self) -> None:
        """Nothing follows. Does not wait, and raises nothing."""
        with contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()  # whose answer is not waited for
        with contextlib.suppress(OSError):
            self.flush()
