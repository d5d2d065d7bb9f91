"""What a test with several connections has made is closed behind it, and nothing must be left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.target.iscsi import several


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    made, several.HOSTS[:] = list(several.HOSTS), []
    for host in made:
        host.end()
