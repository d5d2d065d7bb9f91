"""The QueuePair contract over Soft-RoCE, in both modes."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Provider, connect
from tests.contract.test_queuepair import *  # noqa: F403 (the suite itself)
from tests.contract.test_queuepair_ends import *  # noqa: F403
from tests.rcap.verbs import suite

PROVIDERS = [
    # The kernel's software iWARP has regions only: they are shown there.
    pytest.param(suite.provider("rxe", "region"), marks=pytest.mark.long),
    suite.provider("rxe", "window"),
]

__all__ = ["connect"]


@pytest.fixture(params=PROVIDERS, ids=str)
def provider(request: pytest.FixtureRequest) -> Provider:
    return request.param  # type: ignore[no-any-return]
