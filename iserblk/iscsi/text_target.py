"""The target's side of a text operation in full feature phase (RFC 7143 sections 11.10, 11.11).

One at a time on a connection, as the standard has it: a new one ends the one before. Questions and
answers longer than one PDU go in parts, under a Target Transfer Tag.
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
    """A ``Declare``: the answer to a key other than SendTargets, None where it gets none."""
    return NOT_UNDERSTOOD


def send_targets_answer(
    question: list[tuple[str, str]], targets: Mapping[str, Sequence[str]], declare: Declare
) -> bytes:
    """The answer to a whole question (appendix C): SendTargets, and what ``declare`` says of other
    keys.

    ``targets``: addresses (``host:port,tag``) by target name. An empty value names the session's
    own target: there is just one here.
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
    """What a Text Response says: ``flags`` are F and C."""

    flags: int
    ttt: int
    data: bytes


class TextResponder:
    """Gives the part to send for each Text Request. ``declare`` takes what may be declared at any
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
        """``limit``: data bytes of one PDU. None: the tag is of no operation under way, and the
        request is to be rejected. Raises RemoteProtocolError for a question that is none."""
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
        """A fresh one each time: an old request that comes late is told from the next."""
        self._ttt = self._next_ttt
        self._next_ttt = (self._next_ttt + 1) & 0x7FFFFFFF
        return self._ttt
