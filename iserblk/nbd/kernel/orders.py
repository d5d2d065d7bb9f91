"""What attach hands to the process of a server, and what that process answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from iserblk.errors import IserblkError

PROGRAM = "iserblk.nbd.kernel.serving"  # the module that is run
READY = b"ready"


def words_of(urls: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """URLs and options as arguments, for our server and for nbdkit's plugin."""
    return [
        *(f"uri={url}" for url in urls),
        *(f"{name}={value}" for name, value in options.items()),
    ]


def from_words(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The URLs and options of which ``words_of`` made ``words``."""
    pairs = [word.partition("=")[::2] for word in words]
    urls = [value for name, value in pairs if name == "uri"]
    return urls, {name: value for name, value in pairs if name != "uri"}


def refusal(error: str, status: int) -> bytes:
    """What a server answers that cannot serve. ``status``: for attach to end with."""
    return json.dumps({"error": error, "status": status}).encode()


def error_of(refused: bytes) -> IserblkError:
    """The error to raise for a ``refusal``."""
    answer = json.loads(refused)
    kind = type("ServerRefused", (IserblkError,), {"exit_status": answer["status"]})
    error = kind(answer["error"])
    assert isinstance(error, IserblkError)
    return error
