"""The tests here run with a kubelet that scripts/kubelet has built: inside a virtual machine, or on
this one with its ``--here``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "KUBELET" not in os.environ:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="needs a kubelet: run scripts/kubelet"))
