"""The QueuePair contract over software iWARP of the kernel: it has no windows."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Provider, connect
from tests.contract.test_queuepair import *  # noqa: F403 (the suite itself)
from tests.contract.test_queuepair_ends import *  # noqa: F403
from tests.rcap.verbs import suite

PROVIDERS = [suite.provider("siw", "region")]

__all__ = ["connect"]


@pytest.fixture(params=PROVIDERS, ids=str)
def provider(request: pytest.FixtureRequest) -> Provider:
    return request.param  # type: ignore[no-any-return]
