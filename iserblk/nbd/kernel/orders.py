"""What attach hands to the process of a server, and what that process answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from iserblk.errors import IserblkError

PROGRAM = "iserblk.nbd.kernel.serving"  # the module that is run
READY = b"ready"
TAKE, TAKE_FIRST = "take", "take-first"
LISTEN = "listen"


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


class NoHandOver(IserblkError):
    """A server keeps its connections, or has ended without a successor. A new server can be started
    when it has ended."""


def refusal(error: str, status: int, *, no_hand_over: bool = False) -> bytes:
    """What a server answers that cannot serve. ``status``: for attach to end with.
    ``no_hand_over``: because of its predecessor."""
    return json.dumps({"error": error, "status": status, "no_hand_over": no_hand_over}).encode()


def error_of(refused: bytes) -> IserblkError:
    """The error to raise for a ``refusal``."""
    answer = json.loads(refused)
    if answer["no_hand_over"]:
        return NoHandOver(answer["error"])
    kind = type("ServerRefused", (IserblkError,), {"exit_status": answer["status"]})
    error = kind(answer["error"])
    assert isinstance(error, IserblkError)
    return error
