"""Fixtures of the device server's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from iserblk.target.scsi.device import DeviceServer
from tests.target.scsi.units import SIZE
from tests.target.scsi_client import (
    IQN,
    Client,
    make_unit,
)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lun")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def server(fd: int) -> Iterator[DeviceServer]:
    """Its units own descriptors of their own, of the same file."""
    units = {0: make_unit(os.dup(fd), SIZE), 5: make_unit(os.dup(fd), SIZE, 4096)}
    yield DeviceServer(units, IQN)
    for unit in units.values():
        unit.close()


@pytest.fixture
def client(server: DeviceServer) -> Client:
    return Client(server)
