"""Alerts, dashboard and exporter, with the distribution's Prometheus."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iserblk.disk.blocking import open_disks
from iserblk.metrics.address import socket_of
from iserblk.metrics.exposition import expose
from tests.cli.commands import serving
from tests.metrics.test_exposition import EXAMPLE
from tests.support import logs
from tests.support.interop import Record
from tests.support.ports import free_port
from tests.support.prometheus import programs, promtool, running_prometheus
from tests.support.target import ROOT, running_target
from tests.support.until import until_blocking

MONITORING = ROOT / "monitoring"
RULES = MONITORING / "iserblk.rules.yml"
DASHBOARD = MONITORING / "iserblk.grafana.json"
OWN = {"iserblk_up", "iserblk_scrape_seconds", "iserblk_exporter_left_out", "iserblk_exporter_info"}

_SEVERAL_PORTALS = "iserblk_path_(in_use|failures|access_state)"


def expressions() -> list[str]:
    """Of the dashboard, with its variables replaced as Grafana does for "All"."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        found += [target["expr"] for target in panel["targets"]]
    values = {"$instance": ".*", "$where": ".*", "$__rate_interval": "1m", "$__range": "1m"}
    for name, value in values.items():
        found = [each.replace(name, value) for each in found]
    return found


def metrics() -> set[str]:
    """The names of all samples."""
    lines = expose(lambda: EXAMPLE).decode().splitlines()
    return {line.partition("{")[0] for line in lines if not line.startswith("#")} | OWN


def alerts() -> list[str]:
    return re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)


# --- without Prometheus --------------------------------------------------------------------------


def test_only_metrics_that_there_are() -> None:
    text = RULES.read_text() + "\n".join(expressions())
    used = set(re.findall(r"\biserblk_\w+", text))
    assert len(used) > 20
    assert used - metrics() == set()
    # The dashboard shows all of them.
    shown = set(re.findall(r"\biserblk_\w+", "\n".join(expressions())))
    missing = {each.removesuffix("_bucket").removesuffix("_sum") for each in metrics() - shown}
    assert not missing, f"no panel of {DASHBOARD.name} shows {missing}"


def test_every_alert_is_tried() -> None:
    """Where it fires, and where it does not; and it is documented."""
    tried = (MONITORING / "iserblk.rules.test.yml").read_text()
    document = (ROOT / "docs/monitoring.md").read_text()
    assert len(alerts()) == len(set(alerts())) >= 10
    for name in alerts():
        cases = re.findall(rf"alertname: {name}\n +exp_alerts:( \[\])?", tried)
        assert "" in cases and " []" in cases, name
        assert f"`{name}`" in document


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["targets"] and panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
    names = [each["name"] for each in dashboard["templating"]["list"]]
    used = set(re.findall(r"\$(\w+)", "".join(t["expr"] for p in panels for t in p["targets"])))
    assert used <= {*names, "__rate_interval", "__range"}


# --- with promtool -------------------------------------------------------------------------------


def test_the_rules_are_right() -> None:
    said = promtool("check", "rules", RULES)
    assert f"{len(alerts())} rules found" in said


def test_the_rules_fire_where_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", "iserblk.rules.test.yml", cwd=MONITORING)


def configurations() -> list[str]:
    document = (ROOT / "docs/monitoring.md").read_text()
    return re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)


def test_the_documented_configuration_is_right(tmp_path: Path) -> None:
    (configuration,) = configurations()
    path = tmp_path / "prometheus.yml"
    path.write_text(configuration.replace("/etc/prometheus/iserblk.rules.yml", str(RULES)))
    assert "SUCCESS" in promtool("check", "config", path)
    assert "job_name: iserblk\n" in configuration  # the label that IserblkExporterDown looks for


# --- with a server -------------------------------------------------------------------------------

CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 250ms}}
rule_files: [{rules}]
scrape_configs: [{{job_name: iserblk, static_configs: [{{targets: ["{address}"]}}]}}]
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """With a short path: names of sockets contain those that they are for."""
    with tempfile.TemporaryDirectory(prefix="iserblk.") as directory:
        yield Path(directory)


@pytest.mark.logs(logs.ANOTHER_PORTAL, logs.RECONNECTED, logs.ONE_OF_SEVERAL)
def test_a_target_and_a_server_are_killed(place: Path, record: Record) -> None:
    """Prometheus scrapes the exporter meanwhile: the alerts come and go, and every expression of
    the dashboard has a value."""
    programs()
    directory = place / "sockets"
    directory.mkdir()
    mine = socket_of("/dev/nbd0", directory)
    theirs = socket_of("/dev/nbd1", directory)
    of_target = socket_of("iqn.2026-11.example:other", directory)
    buffer = memoryview(bytearray(4096))
    specs = [f"{place}/one:size=8M", f"{place}/two:size=8M"]
    options = {"metrics": str(mine), "connections": "2", "io-timeout": "60"}
    with (
        running_target(specs, place / "log") as target,
        serving("exporter", "--listen", "127.0.0.1:0", "--directory", directory,
                log=place / "exporter.log") as exporter,
        serving("nbd", f"{target.url}/1", "--socket", place / "nbd", "--metrics", theirs,
                log=place / "nbd.log") as other,
        serving("target", "--listen", "127.0.0.1:0", "--iqn", "iqn.2026-11.example:other", "--lun",
                f"{place}/three:size=8M", "--metrics", of_target, log=place / "target.log"),
        open_disks([f"{target.url}/0"], options) as disks,
        running_prometheus(
            free_port(),
            CONFIGURATION.format(rules=RULES, address=exporter.url.split("/")[2]),
            place,
        ) as server,
    ):  # fmt: skip
        disk = disks.disks["lun0"]

        def used() -> None:
            for number in range(4):
                disk.write(buffer, number * 4096)
                disk.read_into(buffer, number * 4096)
            disk.flush()

        def shows(expression: str, *wanted: float) -> bool:
            found = sorted(value for _, value in server.values(expression))
            return found == sorted(wanted)

        def pending() -> set[tuple[str, str]]:
            found = server.ask("alerts")["alerts"]
            return {
                (each["labels"]["alertname"], each["labels"].get("where", "")) for each in found
            }

        # Every expression has a value once there is traffic; those of several portals have none.
        left = [each for each in expressions() if not re.search(_SEVERAL_PORTALS, each)]
        assert len(left) > 25

        def all_have_values() -> bool:
            used()
            left[:] = [each for each in left if not has_value(server.values(each))]
            return not left

        until_blocking(all_have_values)
        until_blocking(lambda: shows("iserblk_up", 1, 1, 1))
        until_blocking(lambda: pending() == set())

        target.kill()
        until_blocking(lambda: shows("iserblk_connected", 0, 0))
        until_blocking(lambda: shows("iserblk_up", 1, 1, 1))
        down = {("IserblkDisconnected", "/dev/nbd0"), ("IserblkDisconnected", "/dev/nbd1")}
        until_blocking(lambda: down <= pending())

        other.kill()
        until_blocking(lambda: shows("iserblk_up", 1, 1, 0))
        until_blocking(lambda: shows('iserblk_up{where="/dev/nbd1"}', 0))
        until_blocking(lambda: ("IserblkProcessDown", "/dev/nbd1") in pending())

        with running_target(specs, place / "log", listen=target.listen):
            used()
            until_blocking(lambda: shows("iserblk_connected", 1))
            until_blocking(lambda: shows("iserblk_reconnects_total", 1))
            until_blocking(lambda: not down & pending())
            until_blocking(lambda: all_evaluated(server.ask("rules")))
            for expression in expressions():
                server.values(expression)
            # The exporter was there all the time. (Its answer does not always come in time.)
            until_blocking(lambda: shows('up{job="iserblk"}', 1))
            assert exporter.process.poll() is None
            version = server.ask("status/buildinfo")["version"]
    record(
        ours="exporter",
        peer="prometheus",
        version=f"prometheus {version}",
        transport="HTTP",
        ran=f"scraped while a target and a server are killed; {len(expressions())} expressions "
        f"of the dashboard, {len(alerts())} alerts",
    )


def has_value(values: list[tuple[dict[str, str], float]]) -> bool:
    return any(not math.isnan(value) for _, value in values)


def all_evaluated(found: Any) -> bool:
    rules = [rule for group in found["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == alerts()
    assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
    return all(rule["health"] == "ok" for rule in rules)
