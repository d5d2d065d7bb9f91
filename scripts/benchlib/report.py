"""Tables for people, and JSON for machines (docs/running-benchmarks.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchlib.goals import Goal, Kind, Outcome, Verdict, peer_of
from benchlib.load import CONNECTION_JOBS, JOBS, MEMORY_JOBS, NET_JOBS, Measurement
from benchlib.results import Row, Sample, Spread, ratio

JSON_VERSION = 1
_JOBS = {job.name: job for job in (*JOBS, *CONNECTION_JOBS, *NET_JOBS, *MEMORY_JOBS)}
_MEBI = 1 << 20


def rate_text(spread: Spread, large: bool) -> str:
    """Median and, in brackets, lowest to highest."""
    if large:
        low, mid, high = (f"{value / _MEBI:,.0f}" for value in _ordered(spread))
        return f"{mid} MiB/s ({low}–{high})"
    low, mid, high = (f"{value / 1000:.1f}" for value in _ordered(spread))
    return f"{mid} K/s ({low}–{high})"


def by_process(values: dict[str, float], unit: str) -> str:
    """Values by process as text, such as "nbdkit 60 + target 40 µs"; the client is the last."""
    return " + ".join(f"{name} {value:,.0f}" for name, value in values.items()) + f" {unit}"


def section_table(section: str, rows: Sequence[Row]) -> Table:
    """The table of a section: one line per measured row; ratios are to the subject's peer."""
    found = list(dict.fromkeys(peer_of(section, row.subject) for row in rows))
    table = Table(title=f"{section}: ratios are to {', '.join(found)}", title_justify="left")
    table.add_column("job", no_wrap=True)
    table.add_column("subject", no_wrap=True)
    for heading in ("median (low–high)", "ratio", "p50 µs", "p99 µs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("CPU time per request")
    table.add_column("peak memory")
    by_name = {(row.job, row.subject): row for row in rows}
    last_job = None
    for row in rows:
        if row.missing or not row.samples:
            continue
        if last_job not in {None, row.job}:
            table.add_section()
        job = row.job.name if row.job != last_job else ""
        last_job = row.job
        peer = by_name.get((row.job, peer_of(section, row.subject)))
        compared = ratio(row, peer) if peer is not None else None
        table.add_row(
            job,
            row.subject,
            rate_text(row.rate(), row.job.large),
            f"{compared.median:.2f}" if compared is not None else "",
            _number(row.latency_us(50)),
            _number(row.latency_us(99)),
            by_process(row.cpu_us_per_io(), "µs"),
            by_process({k: v / _MEBI for k, v in row.peak_rss().items()}, "MiB"),
        )
    return table


def goals_table(outcomes: Sequence[Outcome]) -> Table:
    """The last table: each goal, the value reached, with and without CRC, and the verdict."""
    table = Table(
        title="goals (over iSER decided with MPA CRC on, the default)", title_justify="left"
    )
    for heading in ("section", "job", "subject", "goal"):
        table.add_column(heading, no_wrap=True)
    for heading in ("reached", "without CRC"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    colour = {Verdict.MET: "green", Verdict.MISSED: "red", Verdict.UNKNOWN: "dim"}
    for outcome in outcomes:
        goal = outcome.goal
        verdict = outcome.verdict
        table.add_row(
            goal.section,
            goal.job,
            goal.subject,
            _wanted(goal),
            _reached(goal, outcome.value),
            _reached(goal, outcome.value_no_crc),
            f"[{colour[verdict]}]{verdict.value}[/]",
        )
    return table


def _wanted(goal: Goal) -> str:
    if goal.kind is Kind.MEMORY:
        return f"peak memory of {goal.other} < {goal.wanted / _MEBI:.0f} MiB"
    if goal.kind is Kind.CPU:
        return f"CPU time of {goal.other} ≤ {goal.wanted:g} µs"
    return f"≥ {goal.wanted:g} of {goal.other}"


def _reached(goal: Goal, value: float | None) -> str:
    if value is None:
        return "–"
    if goal.kind is Kind.MEMORY:
        return f"{value / _MEBI:.0f} MiB"
    return f"{value:.1f} µs" if goal.kind is Kind.CPU else f"{value:.2f}"


def absences(rows: Sequence[Row]) -> list[str]:
    """One line per subject and reason: which rows are missing, and why."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.missing or not row.samples:
            why = row.missing or "not reached"
            reasons.setdefault((row.section, row.subject, why), []).append(row.job.name)
    total: dict[tuple[str, str], int] = {}
    for row in rows:
        total[row.section, row.subject] = total.get((row.section, row.subject), 0) + 1
    return [
        f"{section}/{'*' if len(jobs) == total[section, subject] else ','.join(jobs)}/{subject}: "
        f"{reason}"
        for (section, subject, reason), jobs in reasons.items()
    ]


def print_report(console: Console, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
    for section in dict.fromkeys(row.section for row in rows):
        console.print(section_table(section, [row for row in rows if row.section == section]))
    missing = absences(rows)
    if missing:
        console.print("Rows that are absent, and why:")
        for line in missing:
            console.print(f"  {line}", markup=False, highlight=False)
    asked_for = {(row.section, row.job.name, row.subject) for row in rows}
    shown = [
        each
        for each in outcomes
        if (each.goal.section, each.goal.job, each.goal.subject) in asked_for
    ]
    if shown:
        console.print(goals_table(shown))


def as_json(
    machine: dict[str, Any], rows: Sequence[Row], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """All results, unrounded, with every sample of every round."""
    return {
        "version": JSON_VERSION,
        "machine": machine,
        "rows": [_row_json(row, rows) for row in rows],
        "goals": [
            {
                "section": outcome.goal.section,
                "job": outcome.goal.job,
                "subject": outcome.goal.subject,
                "other": outcome.goal.other,
                "kind": outcome.goal.kind.value,
                "wanted": outcome.goal.wanted,
                "value": outcome.value,
                "value_no_crc": outcome.value_no_crc,
                "verdict": outcome.verdict.value,
            }
            for outcome in outcomes
        ],
    }


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(file: Path) -> tuple[dict[str, Any], list[Row]]:
    """The machine and the rows of a file that ``write_json`` has written. Raises ValueError, with
    the reason; OSError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != JSON_VERSION:
            raise ValueError(f"version {content['version']}, not {JSON_VERSION}")
        rows = [_row_of(each) for each in content["rows"]]
        return dict(content["machine"]), rows
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it has no results of scripts/bench: {error!r}") from None


def _row_of(found: dict[str, Any]) -> Row:
    samples = [
        Sample(Measurement(**each["measured"]), each["cpu_seconds"], each["peak_rss"])
        for each in found["samples"]
    ]
    missing = found["missing"] or ""
    return Row(found["section"], _JOBS[found["job"]], found["subject"], samples, absent=missing)


def _row_json(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "section": row.section,
        "job": row.job.name,
        "subject": row.subject,
        "unit": "bytes/s" if row.job.large else "requests/s",
        "missing": row.missing or None,
        "samples": [asdict(sample) for sample in row.samples],
    }
    if row.samples and not row.missing:
        found["rate"] = asdict(row.rate())
        found["cpu_us_per_io"] = row.cpu_us_per_io()
        found["peak_rss"] = row.peak_rss()
        found["ratios"] = {
            other.subject: compared.median
            for other in rows
            if (other.section, other.job) == (row.section, row.job) and other is not row
            if (compared := ratio(row, other)) is not None
        }
    return found


def _ordered(spread: Spread) -> tuple[float, float, float]:
    return spread.low, spread.median, spread.high


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
