"""Certificates for tests of TLS, made with the program openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.nbdkit import need

_DAYS = "2"


def _openssl(*words: object, cwd: Path) -> None:
    done = subprocess.run(
        ["openssl", *map(str, words)], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr


class Authority:
    """A CA in ``place``. Each directory that it makes has the names that NBD programs know."""

    def __init__(self, place: Path, name: str = "Test CA") -> None:
        need("openssl")
        self.place = place
        place.mkdir(exist_ok=True)
        _openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", _DAYS),
            *("-keyout", "ca-key.pem", "-out", "ca-cert.pem", "-subj", f"/CN={name}"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 wants it
            cwd=place,
        )
        self._serial = 1

    def _issue(self, directory: Path, role: str, name: str) -> None:
        directory.mkdir(exist_ok=True)
        _openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", directory / f"{role}-key.pem", "-out", directory / f"{role}.csr"),
            cwd=self.place,
        )
        self._serial += 1
        _openssl(
            *("x509", "-req", "-in", directory / f"{role}.csr", "-days", _DAYS),
            *("-CA", "ca-cert.pem", "-CAkey", "ca-key.pem", "-set_serial", self._serial),
            *("-copy_extensions", "copy", "-out", directory / f"{role}-cert.pem"),
            cwd=self.place,
        )
        (directory / f"{role}.csr").unlink()
        (directory / "ca-cert.pem").write_bytes((self.place / "ca-cert.pem").read_bytes())

    def server(self, directory: Path) -> Path:
        self._issue(directory, "server", "localhost")
        return directory

    def client(self, directory: Path, certificate: bool = True) -> Path:
        """Without ``certificate``: it only knows the CA."""
        if certificate:
            self._issue(directory, "client", "a client")
        else:
            directory.mkdir(exist_ok=True)
            (directory / "ca-cert.pem").write_bytes((self.place / "ca-cert.pem").read_bytes())
        return directory
