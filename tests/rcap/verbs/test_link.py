"""The parameters of a connection over a device. No device is needed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from iserblk.errors import NotSupported
from iserblk.rcap.verbs import api
from iserblk.rcap.verbs.link import Link


def shown(parameters: object) -> dict[str, int]:
    """pyverbs shows the fields, and has no other way to them."""
    rows = re.findall(r"^([a-z ]+?) *: *(\d+) *$", str(parameters), re.MULTILINE)
    return {name: int(value) for name, value in rows}


def test_depths_of_reads_are_those_of_connection_management() -> None:
    """IRD is the Responder Resources, ORD is the Initiator Depth.

    proves: ISER-GEN-2.1.4-1, ISER-IB00-2.1.4-1
    """
    try:
        api.pyverbs("cmid")
    except NotSupported as error:
        pytest.skip(str(error))
    made = Link.parameters(SimpleNamespace(number=77), 5, 3, b"\x80\0\0\0")  # type: ignore[arg-type]
    fields = shown(made)
    assert (fields["responder resources"], fields["initiator depth"]) == (5, 3)
    assert fields["qp number"] == 77


class QueuePair:
    """What ``Link.ready`` needs of a link. ``said``: the depths (in, out) of connection management,
    after both ends had their say; ``set``: those that the queue pair got."""

    def __init__(self, said: tuple[int, int]) -> None:
        self.identifier = self._qp = self
        self._error = OSError
        self._said = said
        self.set: dict[str, int] = {}

    def _to(self, state: int) -> None:
        assert state == api.QPS_INIT

    def init_qp_attr(self, state: int) -> tuple[SimpleNamespace, int]:
        if state == api.QPS_RTR:
            return SimpleNamespace(max_dest_rd_atomic=self._said[0]), 0
        assert state == api.QPS_RTS
        return SimpleNamespace(max_rd_atomic=self._said[1]), 0

    def modify(self, attributes: SimpleNamespace, mask: int) -> None:
        self.set.update(vars(attributes))


# shows: SYSTEM-35
@pytest.mark.parametrize(
    ("ours", "said", "agreed"),
    [
        ((64, 64), (1, 16), (1, 16)),  # an initiator that reads nothing: Initiator Depth 1
        ((16, 8), (64, 64), (16, 8)),
        ((64, 64), (0, 0), (0, 0)),
    ],
)
def test_each_depth_is_the_minimum_of_both_ends(
    ours: tuple[int, int], said: tuple[int, int], agreed: tuple[int, int]
) -> None:
    """proves: ISER-RC-14"""
    pair = QueuePair(said)
    assert Link.ready(pair, *ours) == agreed  # type: ignore[arg-type]
    assert (pair.set["max_dest_rd_atomic"], pair.set["max_rd_atomic"]) == agreed
