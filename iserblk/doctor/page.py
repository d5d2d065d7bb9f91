"""The doctor's report as a page of HTML: one file with all that it needs, which fetches nothing,
runs nothing, and can be read without scripts, in the dark, on a phone and on paper.

The page is made of the report's JSON (docs/json.md), in which secrets are hidden already. Every
text of it is escaped, and characters that do not print are written as escapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from iserblk.doctor.finding import ERROR, OK, SKIPPED, WARNING
from iserblk.printable import printable

_STYLE = """\
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--faint:#5b6570;--line:#d5dae0;
--head:#f3f5f7;--good:#19692c;--warn:#8a5300;--bad:#b3211b}
@media (prefers-color-scheme:dark){:root{--back:#15181c;--text:#e4e8ec;--faint:#9aa5b0;
--line:#353c44;--head:#1f242a;--good:#6fd08a;--warn:#f0b04c;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:74rem;padding:1.2rem;background:var(--back);color:var(--text);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:0 0 .2rem}
h2{font-size:1.1rem;margin:1.8rem 0 .5rem;border-bottom:1px solid var(--line);padding-bottom:.2rem}
p{margin:.3rem 0}
nav{margin:.6rem 0;font-size:.9rem}
nav a{color:inherit;margin-right:.9rem}
.faint{color:var(--faint)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .7rem .25rem 0;
border-bottom:1px solid var(--line)}
th{font-weight:600;white-space:nowrap}
thead th{background:var(--head);padding-left:.3rem}
td.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.short{white-space:nowrap;overflow-wrap:normal}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.85em}
.ok{color:var(--good)}.warning{color:var(--warn)}.error{color:var(--bad)}.skipped{color:var(--faint)}
.ok,.warning,.error{font-weight:600}
.bar{display:block;height:.5rem;background:var(--faint);border-radius:2px}
.verdict{border-left:4px solid var(--line);padding:.3rem .8rem;margin:.5rem 0;
background:var(--head)}
.verdict.good{border-color:var(--good)}.verdict.poor{border-color:var(--bad)}
.many{min-width:56rem}
@media (max-width:40rem){.few thead{display:none}.few tr{display:block;padding:.3rem 0;
border-bottom:1px solid var(--line)}.few td{display:block;border:0;padding:.05rem 0;width:auto}
.few td.number{text-align:left}.few td:empty{display:none}}
@media print{.many{min-width:0}}
@media print{:root{--back:#fff;--text:#000;--faint:#444;--line:#999;--head:#fff;--good:#000;
--warn:#000;--bad:#000}body{max-width:none;padding:0;font-size:10pt}nav{display:none}
.wide{overflow:visible}tr{break-inside:avoid}h2{break-after:avoid}}
"""

_SECTIONS = (
    ("todo", "What to do"),
    ("portals", "Portals"),
    ("runs", "What runs here"),
    ("named", "Named LUNs"),
    ("machine", "Machine"),
    ("versions", "Versions"),
    ("checks", "Checks of this machine"),
    ("processes", "Processes"),
    ("log", "Last log lines"),
    ("unread", "What could not be read"),
)
_BAR = 100  # percent
_MOST_PLACES = 8  # of another user's that are named
_FEW = 4  # columns of a table that a narrow screen can show


def page(report: Mapping[str, Any], uses: Mapping[str, str]) -> str:
    """The whole page. ``report``: as docs/json.md has it. ``uses``: key of ``works`` → words."""
    host = report["machine"]["host"]
    made = _moment(report["time"])
    bodies = (
        _todo(report),
        "".join(_portal(each) for each in report["portals"])
        or _note("No portal was given: `iserblk doctor --html FILE URL` tries one."),
        _runs(report),
        _named(report),
        _facts(report["machine"]),
        _table(("what", "version"), [(_t(each["name"]), _version(each)) for each in
                                     report["versions"]]),
        _works(report, uses) + _findings(report["findings"], timed=False),
        _processes(report),
        _log(report),
        _unread(report),
    )  # fmt: skip
    sections = [
        f'<section id="{name}"><h2>{title}</h2>{body}</section>'
        for (name, title), body in zip(_SECTIONS, bodies, strict=True)
    ]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in _SECTIONS)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>iserblk doctor: {_t(host)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>iserblk doctor: {_t(host)}</h1>"
        f'<p class="faint">{_t(made)}; by {_t(report["user"])}; iserblk '
        f"{_t(report['versions'][0]['version'])}. Secrets are left out, or hidden as ***; read "
        "the page before you give it away: it has names of hosts, targets and files.</p>"
        f"<nav>{links}</nav></header>\n<main>\n" + "\n".join(sections) + "\n</main>\n</body>\n"
        "</html>\n"
    )


# --- sections ------------------------------------------------------------------------------------


def _todo(report: Mapping[str, Any]) -> str:
    parts = []
    for portal in report["portals"]:
        kind = "good" if portal["works"] else "poor"
        what = "Traditional iSCSI" if portal["traditional"] else "iSER"
        words = "works" if portal["works"] else "does not work"
        parts.append(
            f'<p class="verdict {kind}">{what} {words} towards <b>{_t(portal["address"])}</b></p>'
        )
    rows: list[Sequence[str]] = []
    findings = [
        *((portal["address"], each) for portal in report["portals"] for each in portal["findings"]),
        *(("", each) for each in report["findings"]),
    ]
    rows += _problems(findings, ERROR)
    rows += _bad_uses(report["uses"])
    rows += _problems(findings, WARNING)
    if not rows:
        return "".join(parts) + _note("Nothing: every check was good.")
    return "".join(parts) + _table(("", "what", "remedy"), rows)


def _problems(
    findings: Sequence[tuple[str, Mapping[str, Any]]], status: str
) -> Iterable[Sequence[str]]:
    for where, each in findings:
        if each["status"] == status:
            own = not where or where in each["name"]
            name = each["name"] if own else f"{each['name']} ({where})"
            what = f"<b>{_t(name)}</b><br>{_t(each['text'])}"
            yield _state(status, status), what, _t(each["remedy"])


def _bad_uses(uses: Sequence[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    """One for each device and mount; of all else the first of each kind, and how many more."""
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for use in uses:
        if use["bad"]:
            own = use["where"] if use["what"] in ("attach", "mount") else ""
            kinds.setdefault((use["state"], use["what"], own), []).append(use)
    for (state, what, _), found in kinds.items():
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        where = f"<b>{_t(what)}</b><br>{_t(found[0]['where'])}{more}"
        yield _state(ERROR, state), where, _t(found[0]["remedy"])


def _portal(portal: Mapping[str, Any]) -> str:
    provider = f", over {_t(portal['provider'])}" if portal["provider"] else ""
    return f"<h3>{_t(portal['url'])}{provider}</h3>" + _findings(portal["findings"], timed=True)


def _findings(findings: Sequence[Mapping[str, Any]], *, timed: bool) -> str:
    longest = max((each["seconds"] or 0.0 for each in findings), default=0.0) or 1.0
    rows = []
    for each in findings:
        text = _t(each["text"])
        if each["remedy"] and each["status"] != OK:
            text += f'<br><span class="faint">→ {_t(each["remedy"])}</span>'
        row = [_state(each["status"], each["status"]), _t(each["name"]), text]
        if timed:
            row[2:2] = [_duration(each["seconds"], longest)]
        rows.append(tuple(row))
    head = ("", "step", "took", "result") if timed else ("", "what", "result")
    return _table(head, rows, numbers=(2,) if timed else ())


def _duration(seconds: float | None, longest: float) -> str:
    if seconds is None:
        return ""
    share = round(_BAR * seconds / longest)
    return f'{_milliseconds(seconds)}<span class="bar" style="width:{share}%"></span>'


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _runs(report: Mapping[str, Any]) -> str:
    head = ("state", "what", "where", "LUN", "size", "unflushed", "since", "PID")
    rows = []
    for use in report["uses"]:
        lun = use["name"] or use["url"] or use["target"] or ""
        rows.append(
            (
                _state("error" if use["bad"] else OK, use["state"]),
                _t(use["what"] or "a program"),
                _t(use["where"]),
                _t(lun),
                _size(use["size"]),
                _size(use["unflushed_bytes"]),
                _t(_moment(use["since"])) if use["since"] is not None else "",
                _t(use["pid"] or ""),
            )
        )
        for session in use["sessions"]:
            rows.append((_state(OK, "logged in"), "session", _t(session["address"] or ""),
                         _t(session["initiator"]), "", "", "", ""))  # fmt: skip
    if not rows:
        return _note("Nothing of iserblk runs here.")
    return _table(head, rows, numbers=(4, 5), short=(0, 1, 6, 7))


def _named(report: Mapping[str, Any]) -> str:
    rows = []
    for each in report["named"]:
        if each["error"]:
            rows.append((_t(each["name"]), _state("error", "error"), _t(each["error"]), ""))
            continue
        place = " ".join(each["devices"]) or each["mountpoint"] or ""
        rows.append((_t(each["name"]), _t(place), "<br>".join(map(_t, each["urls"])),
                     _t(", ".join(each["options"]))))  # fmt: skip
    head = ("name", "where", "URLs", "options")
    return _table(head, rows) if rows else _note("No LUN has a name that this user can read.")


def _facts(machine: Mapping[str, Any]) -> str:
    virtual = machine["virtual"]
    memory = (
        f"{_words_of_size(machine['memory'])}, {_words_of_size(machine['available'])} available"
    )
    rows = [
        ("host", machine["host"]),
        ("distribution", machine["distribution"] or "not known"),
        ("kernel", f"{machine['kernel']}, {machine['architecture']}"),
        ("processors", f"{machine['processors']} {machine['processor']}".strip()),
        ("memory", memory if machine["memory"] else "not known"),
        ("running for", f"{machine['uptime'] // 3600} h {machine['uptime'] // 60 % 60} min"),
        ("machine", virtual or "not known"),
        ("container", machine["container"] or "none known"),
        ("RDMA devices", ", ".join(machine["rdma_devices"]) or "none"),
    ]
    return _table(("", ""), [(_t(name), _t(value)) for name, value in rows], head=False)


def _works(report: Mapping[str, Any], uses: Mapping[str, str]) -> str:
    rows = [
        (_state(OK if report["works"][key] else SKIPPED, "yes" if report["works"][key] else "no"),
         _t(words))
        for key, words in uses.items()
    ]  # fmt: skip
    return _table(("", "what works here"), rows)


def _processes(report: Mapping[str, Any]) -> str:
    rows = [
        (_t(each["pid"]), _t(each["user"]), f"<code>{_t(' '.join(each['command_line']))}</code>")
        for each in report["processes"]
    ]
    text = _table(("PID", "user", "command line"), rows) if rows else _note("None.")
    variables = [
        (_t(each["name"]), f"<code>{_t(each['value'])}</code>") for each in report["environment"]
    ]
    if variables:
        text += "<h3>Environment of this command</h3>" + _table(("variable", "value"), variables)
    return text


def _log(report: Mapping[str, Any]) -> str:
    rows = [
        (_t(_moment(each["time"])) if each["time"] else "", _t(each["source"]),
         f'<span class="mono">{_t(each["text"])}</span>')
        for each in report["log"]
    ]  # fmt: skip
    return (
        _table(("time", "source", "line"), rows, short=(0, 1)) if rows else _note("There are none.")
    )


def _unread(report: Mapping[str, Any]) -> str:
    rows = [(_t(each["what"]), _t(each["why"])) for each in report["unread"]]
    for each in report["unseen"]:
        what = f"processes of {each['user']}" if each["user"] else "own processes"
        more = len(each["places"]) - _MOST_PLACES
        named = [*each["places"][:_MOST_PLACES], *([f"{more} more"] if more > 0 else [])]
        places = f" at {', '.join(named)}" if named else ""
        rows.append((_t(what + places), _t(each["why"])))
    if not rows:
        return _note("Nothing.")
    return _note("This user may not read these; the report may lack what is in them.") + _table(
        ("what", "why"), rows
    )


# --- parts ---------------------------------------------------------------------------------------


def _t(value: object) -> str:
    """Any text, for the content of an element or an attribute."""
    return escape(printable(str(value)), quote=True)


def _note(text: str) -> str:
    return f'<p class="faint">{_t(text)}</p>'


def _state(kind: str, words: str) -> str:
    return f'<span class="{_t(kind)}">{_t(words)}</span>'


def _table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    short: Sequence[int] = (0,),
    head: bool = True,
) -> str:
    """``rows`` are HTML. ``numbers``, ``short``: columns of numbers, and of text that stays in one
    line. A narrow screen shows the cells of a row below each other, or has to be scrolled where
    there are many columns."""
    top = "".join(f'<th scope="col">{_t(name)}</th>' for name in names)
    lines = []
    for row in rows:
        cells = []
        for index, cell in enumerate(row):
            kind = "number" if index in numbers else "short" if index in short else ""
            kind = kind and f' class="{kind}"'
            cells.append(f"<td{kind}>{cell}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    above = f"<thead><tr>{top}</tr></thead>" if head else ""
    size = "many" if len(names) > _FEW else "few"
    body = f"{above}<tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide"><table class="{size}">{body}</table></div>'


def _version(row: Mapping[str, Any]) -> str:
    if row["version"] is None:
        return '<span class="faint">not installed</span>'
    return _t(row["version"] or "installed; the version is not known")


def _size(size: int | None) -> str:
    return "" if size is None else _t(_words_of_size(size))


def _words_of_size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'bytes' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _moment(seconds: float) -> str:
    """Local time, with the zone, for those who read it elsewhere."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))
