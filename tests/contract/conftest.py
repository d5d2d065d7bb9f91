"""The providers that the QueuePair suite runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import pytest

from iserblk.rcap import seam
from iserblk.rcap.inprocess import memory_pair
from tests.rcap.sctp_pair import fake_pair as sctp_pair
from tests.rcap.verbs.fake import fake_pair
from tests.rcap.verbs.limits import DEVICES_CANNOT
from tests.rcap.wire import Driver, iwarp_pair


@dataclass(frozen=True)
class Provider:
    """How to make a connected pair, and what it can do.

    ``make`` takes ``ird``, ``ord``, ``receive_size`` and ``private_data``. ``codes``: a violation
    carries the Terminate of RFC 5040. ``flow_control``: what is posted may have to wait for the
    peer to read. ``cannot``: what tests ask for with ``needs``, and why it is not to be had here.
    """

    name: str
    make: Callable[..., tuple[seam.QueuePair, seam.QueuePair]]
    codes: bool = True
    flow_control: bool = True
    cannot: Mapping[str, str] = field(default_factory=dict)

    def needs(self, *abilities: str) -> None:
        """Skip the test, with the reason, where one of them is missing."""
        for ability in abilities:
            if ability in self.cannot:
                pytest.skip(f"{self.name}: {self.cannot[ability]}")

    def __str__(self) -> str:
        return self.name


def _iwarp(**fixed: object) -> Callable[..., tuple[seam.QueuePair, seam.QueuePair]]:
    return lambda **options: iwarp_pair(**{**fixed, **options})


PROVIDERS = [
    Provider("memory", memory_pair, flow_control=False),
    Provider("iwarp", _iwarp()),
    Provider("iwarp-nocrc", _iwarp(crc=False)),
    Provider("iwarp-small-segments", _iwarp(emss=1448)),
    Provider("iwarp-small-buffers", _iwarp(small_buffers=True)),
    Provider("iwarp-nocrc-small-buffers", _iwarp(crc=False, small_buffers=True)),
    Provider("iwarp-markers", _iwarp(markers=True)),
    Provider("iwarp-markers-nocrc", _iwarp(markers=True, crc=False)),
    Provider("iwarp-sctp", sctp_pair),
    Provider("iwarp-sctp-small-packets", partial(sctp_pair, fragmentation_point=1448)),
    Provider("iwarp-sctp-small-buffers", partial(sctp_pair, small_buffers=True)),
    *(
        Provider(
            f"verbs-fake-{mode}",
            partial(fake_pair, mode == "window"),
            codes=False,
            flow_control=False,
            cannot=cannot,
        )
        for mode, cannot in DEVICES_CANNOT.items()
    ),
]


@pytest.fixture(params=PROVIDERS, ids=str)
def provider(request: pytest.FixtureRequest) -> Provider:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def connect(provider: Provider) -> Iterator[Callable[..., Driver]]:
    """A function that connects a pair and returns its driver; closes it all at the end."""
    drivers: list[Driver] = []

    def make(receives: int = 64, **options: object) -> Driver:
        driver = Driver(*provider.make(**options))
        drivers.append(driver)
        for pair in driver.pairs:
            pair.post_receive(receives)
        return driver

    yield make
    for driver in drivers:
        for pair in driver.pairs:
            pair.close()
