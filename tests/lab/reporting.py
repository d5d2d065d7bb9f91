"""Inside the guest: writes every test's report as a line of a file that the host follows, and which
kernel it is.

Loaded with ``-p tests.lab.reporting``.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

REPORTS = "reports"
KERNEL = "kernel"


class Reporter:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        results = Path(os.environ["LAB_RESULTS"])
        mode = ", in user mode" if os.environ["LAB_USER_MODE"] else ""
        (results / KERNEL).write_text(f"Linux {platform.release()}{mode}")
        self._file = (results / REPORTS).open("a", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config))
