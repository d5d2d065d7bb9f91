"""The whole report of ``iserblk doctor``, for ``--json`` and ``--html``: gathered, and without
secrets."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from iserblk.cli.here import all_named, look_around, user_name
from iserblk.cli.named_rows import fields
from iserblk.cli.status import here_json, remedy_of, use_json
from iserblk.doctor.about import about, versions
from iserblk.doctor.finding import Finding
from iserblk.doctor.hiding import HIDDEN, Hider
from iserblk.doctor.journal import cut, last_lines
from iserblk.doctor.known_secrets import KnownSecrets, find_secrets
from iserblk.doctor.machine import Machine
from iserblk.doctor.portal import PortalReport
from iserblk.doctor.processes import Process, hidden, processes, variables
from iserblk.errors import IserblkError
from iserblk.loop.clock import since_epoch
from iserblk.named.files import check_name, directories, load, misnamed, names
from iserblk.secret import Secret


class Surroundings:
    """The processes and secrets of this machine, as this user sees them. ``given``: secrets that
    are known otherwise."""

    def __init__(self, machine: Machine, given: Sequence[Secret] = ()) -> None:
        self.machine = machine
        self.processes = processes(machine)
        self.known = self._secrets()
        self.hider = Hider([*given, *self.known.secrets])

    def _secrets(self) -> KnownSecrets:
        own: list[Path] = []
        with suppress(IserblkError):  # which ``list`` tells of
            own = directories()
        here = os.getcwd() if _has_directory() else "/"
        commands = [(sys.orig_argv, here)]
        commands += [(list(each.words), each.directory) for each in self.processes]
        known = find_secrets(self.machine, os.environ, commands, own)
        for each in self.processes:
            if each.environment is not None:
                found = find_secrets(self.machine, each.environment, ())
                known.secrets += found.secrets
        return known


def _has_directory() -> bool:
    """Whether the working directory is still there."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def findings_json(findings: Sequence[Finding]) -> list[dict[str, object]]:
    return [
        {**asdict(each), "seconds": None if each.seconds is None else round(each.seconds, 6)}
        for each in findings
    ]


def portal_json(report: PortalReport) -> dict[str, object]:
    return {
        "address": report.portal,
        "url": report.url,
        "findings": findings_json(report.findings),
        "provider": report.choice,
        "traditional": report.is_traditional,
        "works": report.error is None,
        "exit_status": report.error.exit_status if report.error is not None else 0,
    }


def report_json(
    findings: Sequence[Finding],
    works: Mapping[str, bool],
    portals: Sequence[PortalReport],
    status: int,
    around: Surroundings,
) -> dict[str, object]:
    """The report, as docs/json.md has it, with no secret in any text."""
    machine, hider = around.machine, around.hider
    here = look_around(sessions=True)
    named = all_named()
    uses = [{**use_json(each, named), "remedy": remedy_of(each)} for each in here.uses]
    log = last_lines(machine)
    unread = {**log.unread, **around.known.unread}
    if hidden(machine):
        unread["processes of other users"] = "/proc does not show them (hidepid)"
    tried = [portal_json(each) for each in portals]
    report: dict[str, object] = {
        "time": int(since_epoch()),
        "user": user_name(str(os.geteuid())),
        "findings": findings_json(findings),
        "works": dict(works),
        "portal": tried[0] if tried else None,
        "portals": tried,
        "exit_status": status,
        "machine": about(machine).fields(),
        "versions": [{"name": name, "version": version} for name, version in versions(machine)],
        **here_json(here, named),
        "uses": uses,
        "named": _named(unread),
        "environment": [
            {"name": name, "value": HIDDEN if value is None else hider.word(value)}
            for name, value in variables(os.environ)
        ],
        "log": [
            {"time": round(each.time, 6), "source": each.source, "text": cut(hider.text(each.text))}
            for each in log.lines
        ],
        "unread": [{"what": what, "why": why} for what, why in unread.items()],
    }
    shown = hider.tree(report)
    assert isinstance(shown, dict)
    return {**shown, "processes": [_process(each, hider) for each in around.processes]}


def _named(unread: dict[str, str]) -> list[dict[str, object]]:
    try:
        every = sorted([*names(), *misnamed()])
    except IserblkError as error:
        unread["named LUNs"] = str(error)
        return []
    found: list[dict[str, object]] = []
    for name in every:
        try:
            check_name(name)
            found.append(fields(load(name)))
        except IserblkError as error:
            found.append({"name": name, "error": str(error)})
    return found


def _process(process: Process, hider: Hider) -> dict[str, object]:
    return {
        "pid": process.pid,
        "user": user_name(str(process.uid)),
        "command_line": [hider.word(word) for word in process.words],
    }
