"""What a page shows in Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from screenshotlib import LeftOut
from screenshotlib.png import reduced, size_of

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 120
MISSING = "Chromium is missing: `apt-get install chromium`"


def chromium() -> str | None:
    """Its path; None: it is not installed."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def picture(url: str, width: int, height: int, *, dark: bool = False) -> bytes:
    """A PNG of ``width`` × ``height`` pixels of the top of a page. Raises LeftOut."""
    program = chromium()
    if program is None:
        raise LeftOut(MISSING)
    with tempfile.TemporaryDirectory(prefix="iserblk-chromium.") as place:
        file = Path(place, "picture.png")
        words = [
            *(program, "--headless", "--disable-gpu", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--no-first-run"),
            *("--hide-scrollbars", "--disable-lcd-text", "--force-color-profile=srgb"),
            *("--force-device-scale-factor=1", "--disable-dev-shm-usage"),
            # Its own sandbox does not work for root, nor inside user namespaces.
            *("--no-sandbox",),
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            f"--user-data-dir={place}/profile",
            f"--window-size={width},{height}",
            f"--screenshot={file}",
            url,
        ]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=_PATIENCE_S,
                env={**os.environ, "HOME": place},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LeftOut(f"Chromium has made no picture of {url}: {error}") from None
        if not file.exists():
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise LeftOut(f"Chromium has made no picture of {url}: {said}")
        made = file.read_bytes()
    if size_of(made) != (width, height):
        raise LeftOut(f"Chromium's picture of {url} is of another size than {width} x {height}")
    return reduced(made)
