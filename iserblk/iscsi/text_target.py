"""The target's side of a text operation in full feature phase (RFC 7143 sections 11.10, 11.11).

A connection has one text operation at a time, as the standard demands: a new operation ends the one
before. Questions and answers longer than one PDU are sent in parts, under a Target Transfer Tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import NOT_UNDERSTOOD
from iserblk.iscsi.text import Collector, encode

Declare = Callable[[str, str], str | None]


def understand_nothing(key: str, value: str) -> str | None:
    """The ``Declare`` that answers NotUnderstood to all keys. A ``Declare`` returns the answer to a
    key other than SendTargets, or None for no answer."""
    return NOT_UNDERSTOOD


def send_targets_answer(
    question: list[tuple[str, str]], targets: Mapping[str, Sequence[str]], declare: Declare
) -> bytes:
    """The answer to a complete question (appendix C): to SendTargets, and by ``declare`` to other
    keys.

    ``targets``: addresses (``host:port,tag``) by target name. An empty value asks for the target of
    the session, which is the only target here.
    """
    answer: list[tuple[str, str]] = []
    for key, value in question:
        if key != "SendTargets":
            answered = declare(key, value)
            if answered is not None:
                answer.append((key, answered))
            continue
        for name, portals in targets.items():
            if value in ("All", "", name):
                answer.append(("TargetName", name))
                answer += (("TargetAddress", portal) for portal in portals)
    return encode(answer)


class TextPart(NamedTuple):
    """The contents of one Text Response. ``flags``: F and C bits."""

    flags: int
    ttt: int
    data: bytes


class TextResponder:
    """Answers Text Requests, part by part. ``declare`` answers keys that may be declared at any
    time."""

    def __init__(self, declare: Declare = understand_nothing) -> None:
        self._declare = declare
        self._collector = Collector()
        self._rest: bytes | None = None  # of an answer; None: the question is not complete
        self._itt = bhs.NO_TAG
        self._ttt = bhs.NO_TAG
        self._next_ttt = 0

    def receive(
        self,
        request: pdu.TextRequest,
        data: bytes | memoryview,
        targets: Mapping[str, Sequence[str]],
        limit: int,
    ) -> TextPart | None:
        """Take a Text Request; returns the contents of the response. ``limit``: data bytes of one
        PDU. None: the tag belongs to no operation under way, and the request is to be rejected.
        Raises RemoteProtocolError for data that is not a text."""
        if request.ttt == bhs.NO_TAG:
            self._collector = Collector()
            self._rest = None
            self._itt = request.itt
        elif (request.itt, request.ttt) != (self._itt, self._ttt):
            return None
        if self._rest is None:
            self._collector.add(data)
            if request.flags & bhs.FLAG_CONTINUE:
                if request.flags & bhs.FLAG_FINAL:
                    raise RemoteProtocolError("iSCSI", "a Text Request with both F and C")
                return TextPart(0, self._take_ttt(), b"")
            self._rest = send_targets_answer(self._collector.take(), targets, self._declare)
        part, self._rest = self._rest[:limit], self._rest[limit:]
        if self._rest:
            return TextPart(bhs.FLAG_CONTINUE, self._take_ttt(), part)
        self._ttt = self._itt = bhs.NO_TAG
        self._rest = None
        return TextPart(bhs.FLAG_FINAL, bhs.NO_TAG, part)

    def _take_ttt(self) -> int:
        """A new tag for each part, so that a late old request differs from the next request."""
        self._ttt = self._next_ttt
        self._next_ttt = (self._next_ttt + 1) & 0x7FFFFFFF
        return self._ttt
