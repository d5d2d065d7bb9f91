"""Inside the guest: keeps pytest-trio from importing hypothesis, which no test there uses. It would
be a third of pytest's start, several seconds.

Loaded with ``-p tests.lab.without_hypothesis -p no:hypothesispytest``.
"""

from __future__ import annotations

import sys

sys.modules["hypothesis"] = None  # type: ignore[assignment]
