"""The QueuePair contract over SCTP of the kernel (RFC 5043)."""

from __future__ import annotations

import socket
import struct

import pytest

from tests.contract.conftest import Provider, connect
from tests.contract.test_queuepair import *  # noqa: F403 (the suite itself)
from tests.contract.test_queuepair_ends import *  # noqa: F403
from tests.rcap.sctp_pair import kernel_association, kernel_pair

PROVIDERS = [
    Provider("iwarp-sctp", kernel_pair),
    # Each frame waits for a delayed SACK: minutes, in an emulated machine.
    pytest.param(
        Provider("iwarp-sctp-small-buffers", lambda **o: kernel_pair(small_buffers=True, **o)),
        marks=pytest.mark.long,
    ),
]

__all__ = ["connect"]


@pytest.fixture(params=PROVIDERS, ids=str)
def provider(request: pytest.FixtureRequest) -> Provider:
    return request.param  # type: ignore[no-any-return]


def test_an_association_has_one_pair_of_streams() -> None:
    """RFC 5043 section 8: as many streams inwards as outwards."""
    one, other = kernel_association()
    with one, other:  # both are open: the kernel has no status of an association that is ending
        for end in (one, other):
            status = end.getsockopt(socket.IPPROTO_SCTP, 14, 256)
            assert struct.unpack_from("=HH", status, 16) == (1, 1)
