"""Prometheus and promtool of the distribution. Needs ``scripts/peers prometheus``."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.target import ROOT
from tests.support.until import until_blocking

_ANSWER_S = 60.0


def programs() -> Path:
    """The directory that has them. Skips the test where there are none."""
    found = subprocess.run(
        [ROOT / "scripts/peers", "prometheus"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"requires prometheus: {found.stderr.strip().splitlines()[-1]}")
    return Path(found.stdout.strip()) / "usr/bin"


def promtool(*arguments: object, cwd: Path | None = None) -> str:
    """What promtool prints. It must find nothing wrong."""
    done = subprocess.run(
        [programs() / "promtool", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A server that scrapes. ``values``: of a query; ``ask``: of its API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(
                f"{self._url}/api/v1/{path}?{query}", None, _ANSWER_S
            ) as got:
                answer = json.load(got)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series, now."""
        data = self.ask("query", query=expression)
        assert data["resultType"] == "vector", expression
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._url}/-/ready", None, _ANSWER_S).close()
        except OSError:
            return False
        return True


@contextmanager
def running_prometheus(port: int, configuration: str, place: Path) -> Iterator[Prometheus]:
    """A server on the loopback interface, with its data and its log in the directory ``place``."""
    program = programs() / "prometheus"
    (place / "prometheus.yml").write_text(configuration)
    log = place / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/tsdb",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")

        def up() -> bool:
            assert process.poll() is None, log.read_text()
            return server.ready()

        until_blocking(up)
        yield server
    finally:
        process.kill()
        process.wait()
