"""The exporter's page: what `iserblk top` shows, as one HTML document.

The document is whole: no font, picture, script or style comes from elsewhere, and POLICY forbids a
browser to load any. It can be read without its script, which only replaces the numbers by newer
ones; without scripts the browser loads the page again. Every name is escaped: peers and users
choose names. There is nothing to press but links to this page, and no secret in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from html import escape
from itertools import groupby

from iserblk import __version__
from iserblk.cli.states import CONNECTED
from iserblk.cli.watch.events import Event
from iserblk.cli.watch.history import (
    SHADES,
    SLOT_S,
    SORT,
    History,
    Key,
    LunHistory,
    heat_map,
    in_order,
)
from iserblk.cli.watch.words import (
    Branch,
    bound_words,
    bytes_words,
    count_words,
    duration_words,
    latency_words,
    paths_of,
)
from iserblk.metrics.counting import OPERATIONS

UPDATE_S = 2  # by the script
RELOAD_S = 5  # without scripts
COLUMNS = 60  # of a heat map: five minutes
_ROWS = 10
MOST_LUNS = 500  # in the table
_MOST_MAPS = 6  # LUNs that are shown whole on the first page
_MOST_EVENTS = 30
_MOST_BAD = 6  # lines about them, above the table
_CELL_WIDTH, _CELL_HEIGHT, _LABEL_WIDTH, _TOP = 10, 12, 66, 8
_CHOSEN = re.compile(rb"lun=([0-9a-f]{16})", re.ASCII)

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1f2328;--faint:#59636e;--line:#d1d9e0;
--card:#f6f8fa;--link:#0550ae;--good:#116329;--bad:#b31d28;
--s1:#cfe3fb;--s2:#85b8f0;--s3:#2f7bd1;--s4:#0b3d80}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--text:#f0f6fc;--faint:#9aa4ae;
--line:#3d444d;--card:#151b23;--link:#79b8ff;--good:#56d364;--bad:#ff8d85;
--s1:#15304f;--s2:#1f5b9c;--s3:#4a9df0;--s4:#c3e1ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.45 system-ui,sans-serif}
main{max-width:1200px;margin:0 auto;padding:12px 16px 32px}
h1{font-size:20px;margin:4px 0}h2{font-size:16px;margin:28px 0 6px;overflow-wrap:anywhere}
a{color:var(--link)}p{margin:6px 0;overflow-wrap:anywhere}.faint{color:var(--faint)}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}
.sums{display:flex;flex-wrap:wrap;gap:8px;margin:12px 0;padding:0}
.sums div{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:6px 12px;
flex:1 1 100px}.sums dt{color:var(--faint);font-size:13px}
.sums dd{margin:0;font-size:18px;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:5px 8px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--faint);font-weight:600;font-size:13px}
.name{text-align:left;overflow-wrap:anywhere}.small .name{white-space:nowrap}
.word{text-align:left;white-space:nowrap}
svg{display:block;width:100%;max-width:900px;height:auto}
svg.key{display:inline-block;width:12px;height:12px;vertical-align:-1px}
svg text{fill:var(--faint);font:11px system-ui,sans-serif}
.s1{fill:var(--s1)}.s2{fill:var(--s2)}.s3{fill:var(--s3)}.s4{fill:var(--s4)}
.away{fill:var(--bad)}.axis{fill:var(--line)}
ul.tree,ul.tree ul{list-style:none;margin:0;padding-left:0}
ul.tree ul{padding-left:18px;border-left:1px solid var(--line);margin-left:5px}
ul.tree li{overflow-wrap:anywhere;padding:1px 0}
ol.events{list-style:none;margin:0;padding:0}ol.events li{padding:2px 0;overflow-wrap:anywhere}
.old{display:none}.stale .old{display:block}
footer{margin-top:28px;color:var(--faint);font-size:13px}
@media (max-width:700px){main{padding:8px 10px 24px}.wide thead{display:none}
.wide,.wide tbody{display:block;width:100%}
.wide tr{display:grid;grid-template-columns:1fr 1fr;column-gap:24px;border:1px solid var(--line);
border-radius:6px;margin:8px 0;padding:6px 10px;background:var(--card)}
.wide .name,.wide .word{grid-column:1/-1}
.wide td{border:0;padding:1px 0;display:flex;justify-content:space-between;
gap:12px;text-align:right}.wide td::before{content:attr(data-name);color:var(--faint);
flex:none}.small th,.small td{padding:4px 2px;font-size:12px}
svg text{font-size:18px}}
"""
_SCRIPT = """
"use strict";
async function again(){
 if(!document.hidden&&!String(getSelection())){
  try{
   const answer=await fetch(location.href,{cache:"no-store"});
   if(!answer.ok)throw new Error(answer.status);
   const fresh=new DOMParser().parseFromString(await answer.text(),"text/html")
    .getElementById("all");
   const old=document.getElementById("all");
   const at=document.activeElement&&document.activeElement.id;
   if(fresh)old.replaceWith(fresh);
   if(at&&document.getElementById(at))document.getElementById(at).focus({preventScroll:true});
   document.body.classList.remove("stale");
  }catch(error){document.body.classList.add("stale");}
 }
 setTimeout(again,UPDATE);
}
setTimeout(again,UPDATE);
""".replace("UPDATE", str(UPDATE_S * 1000))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# What a browser may do with the page: run its script, use its style, and ask for the page again.
POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def _key(shade: int, share: float) -> str:
    words = f"from {share:.0%}" if share else f"below {SHADES[1]:.0%}"
    return (
        f'<svg class="key" viewBox="0 0 10 10" role="img" aria-label="shade {shade}">'
        f'<rect class="s{shade}" width="10" height="10"/></svg> {words}'
    )


_LEGEND = (
    f'<p class="faint">A column is {SLOT_S:g} seconds, a row a range of latencies. Colours are the '
    "share of the requests of this time: "
    + ", ".join(_key(shade, share) for shade, share in enumerate(SHADES, 1))
    + ". A red line below: no connection.</p>\n"
)


def page(history: History, query: bytes = b"", host: str = "") -> bytes:
    """The document. ``query``: of the request, which may choose a LUN: not trusted. ``host``: the
    name of the machine."""
    chosen = chosen_untrusted(query)
    luns = in_order(history, SORT)
    only = [each for each in luns if id_of(each.seen.key) == chosen]
    body = _lun_page(history, only[0]) if only else _overview(history, luns, bool(chosen))
    title = f"iserblk: {_text(host)}" if host else "iserblk"
    look = history.look
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(look.when))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{title}</title>\n<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n'
        f'<noscript><meta http-equiv="refresh" content="{RELOAD_S}"></noscript>\n'
        f'</head>\n<body>\n<main id="all">\n<h1>{title}</h1>\n'
        f'<p class="faint">{when}, of the machine’s clock; updates by itself</p>\n'
        '<p class="bad old" role="status">The exporter does not answer: these numbers are old.'
        "</p>\n"
        f"{body}"
        f'<footer><a href="/metrics" id="metrics">metrics for Prometheus</a>, iserblk '
        f"{_text(__version__)}</footer>\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    ).encode(errors="replace")


def chosen_untrusted(query: bytes) -> str:
    """The LUN that the query of a request names; "": none. Never raises."""
    found = _CHOSEN.fullmatch(query)
    return found[1].decode() if found else ""


def id_of(key: Key) -> str:
    """A LUN in a link: its names are no part of a URL, which servers log."""
    return hashlib.sha256("\0".join(map(str, key)).encode(errors="replace")).hexdigest()[:16]


def _text(text: str) -> str:
    """``text``, escaped, and without characters that show nothing or turn others round."""
    return escape("".join(each if each.isprintable() else "�" for each in text))


# --- the first page ------------------------------------------------------------------------------


def _overview(history: History, luns: Sequence[LunHistory], missed: bool) -> str:
    parts = []
    if missed:
        parts.append('<p class="bad">This LUN is not in use any more.</p>\n')
    parts += [_sums(history, luns), _notes(history)]
    if not luns:
        parts.append("<p>No LUN is in use here by attach, mount or nbd.</p>\n")
    else:
        parts.append(_table(history, luns))
        if len(luns) > MOST_LUNS:
            parts.append(
                f"<p>And {len(luns) - MOST_LUNS} more LUNs: <code>iserblk stats</code></p>"
            )
    parts.append(f"<h2>Events</h2>\n{_events(history, list(history.events), True)}")
    for lun in luns[:_MOST_MAPS]:
        heading = _link(history, lun, "m")
        parts.append(f"<h2>{heading} {_state(lun)}</h2>\n{_heat(history, lun)}")
        parts.append(_tree(lun, history.look.at))
    if luns:
        parts.append(f"<h2>Colours</h2>\n{_LEGEND}")
    return "".join(parts)


def _sums(history: History, luns: Sequence[LunHistory]) -> str:
    known = [each for each in luns if each.rates.seconds]
    look = history.look

    def rate(name: str) -> str:
        if not known:
            return "-"
        return bytes_words(sum(each.rates.bytes_s(name) or 0 for each in known))

    iops = sum(each.rates.iops() or 0 for each in known) if known else None
    bad = sum(each.bad for each in luns) + len(history.unknown)
    cells = [
        ("LUNs", str(len(luns)), ""),
        ("bad", str(bad), "bad" if bad else "good"),
        ("read/s", rate("read"), ""),
        ("write/s", rate("write"), ""),
        ("IOPS", count_words(iops), ""),
        ("in flight", count_words(sum(each.seen.lun.in_flight for each in luns)), ""),
        ("unflushed", bytes_words(sum(each.seen.lun.unflushed for each in luns)), ""),
    ]
    if look.targets:
        cells.append(("targets, sessions", f"{look.targets}, {look.sessions}", ""))
    shown = "".join(
        f'<div><dt>{name}</dt><dd class="{kind}">{value}</dd></div>' for name, value, kind in cells
    )
    return f'<dl class="sums">{shown}</dl>\n'


def _notes(history: History) -> str:
    found = [
        f'<p><span class="bad">{_text(each.state)}</span> {_text(each.where)}</p>\n'
        for each in history.unknown
    ]
    more = len(found) - _MOST_BAD
    if more > 0:
        found = [*found[:_MOST_BAD], f"<p>and {more} more: <code>iserblk status</code></p>\n"]
    found += [f'<p class="faint">{_text(each)}</p>\n' for each in history.look.notes]
    return "".join(found)


def _table(history: History, luns: Sequence[LunHistory]) -> str:
    heads = ("Where", "State", "IOPS", "Read/s", "Write/s", "p50", "p99", "In flight", "Unflushed",
             "LUN")  # fmt: skip
    kinds = ["name", "word", *[""] * 7, "name"]
    row = "".join(
        f'<th scope="col" class="{kind}">{head}</th>'
        for head, kind in zip(heads, kinds, strict=True)
    )
    lines = []
    now = history.look.at
    for lun in luns[:MOST_LUNS]:
        recent, reading = lun.recent(now), lun.seen.lun
        cells = (
            _link(history, lun, "t"),
            _state(lun),
            count_words(lun.rates.iops()),
            bytes_words(lun.rates.bytes_s("read")),
            bytes_words(lun.rates.bytes_s("write")),
            latency_words(recent.percentile_us(50)),
            latency_words(recent.percentile_us(99)),
            count_words(reading.in_flight),
            bytes_words(reading.unflushed),
            _text(lun.seen.title),
        )
        lines.append(
            "<tr>"
            + "".join(
                f'<td class="{kind}" data-name="{head}"><span>{cell}</span></td>'
                for head, kind, cell in zip(heads, kinds, cells, strict=True)
            )
            + "</tr>\n"
        )
    return (
        f'<table class="wide"><thead><tr>{row}</tr></thead>\n<tbody>\n{"".join(lines)}</tbody>'
        '</table>\n<p class="faint">p50, p99: latencies of the last 5 to 10 seconds; K, M, G of '
        "bytes are binary.</p>\n"
    )


def _link(history: History, lun: LunHistory, prefix: str) -> str:
    name = id_of(lun.seen.key)
    words = _text(history.where(lun)) or "-"
    return f'<a href="/?lun={name}" id="{prefix}{name}">{words}</a>'


def _state(lun: LunHistory) -> str:
    kind = "bad" if lun.bad else "good" if lun.state == CONNECTED else ""
    return f'<span class="{kind}">{_text(lun.state)}</span>'


def _events(history: History, events: Sequence[Event], with_place: bool) -> str:
    if not events:
        seconds = history.look.at - (history.began or history.look.at)
        return f'<p class="faint">none for {duration_words(seconds)}</p>\n'
    lines = []
    for each in reversed(events[-_MOST_EVENTS:]):
        when = time.strftime("%H:%M:%S", time.localtime(each.when))
        where = f"{_text(each.where)}: " if with_place else ""
        kind = "bad" if each.bad else ""
        lines.append(
            f'<li><span class="faint">{when}</span> {where}'
            f'<span class="{kind}">{_text(each.words)}</span></li>\n'
        )
    return f'<ol class="events">\n{"".join(lines)}</ol>\n'


# --- one LUN -------------------------------------------------------------------------------------


def _lun_page(history: History, lun: LunHistory) -> str:
    seen, reading = lun.seen, lun.seen.lun
    cells = [
        ("size", bytes_words(reading.size)),
        ("in flight", str(reading.in_flight)),
        ("unflushed", bytes_words(reading.unflushed)),
        ("reconnects", str(reading.reconnects)),
        ("replayed", str(reading.replayed)),
        ("sent again", str(reading.retries)),
        ("past deadline", str(reading.aborted)),
        ("bad digests", str(reading.damaged)),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cells)
    return (
        f'<p><a href="/" id="back">all LUNs</a></p>\n'
        f"<h2>{_text(history.where(lun))} {_state(lun)}</h2>\n"
        f'<p class="name">{_text(seen.title)}, {_text(reading.url)}, '
        f"{_text(seen.command or 'process')} {seen.pid}</p>\n"
        f'<dl class="sums">{shown}</dl>\n'
        f"<h2>Operations</h2>\n{_operations(history, lun)}"
        f"<h2>Latency</h2>\n{_heat(history, lun)}{_LEGEND}"
        f"<h2>Paths</h2>\n{_tree(lun, history.look.at)}"
        f"<h2>Events</h2>\n{_events(history, history.events_of(lun), False)}"
    )


def _operations(history: History, lun: LunHistory) -> str:
    heads = ("", "IOPS", "bytes/s", "mean", "p50", "p99", "p99.9", "failed")
    row = "".join(f'<th scope="col">{head}</th>' for head in heads)
    lines = []
    for name in OPERATIONS:
        total = lun.seen.lun.operations[name]
        recent = lun.recent(history.look.at, name, 12)
        cells = (
            count_words(lun.rates.iops(name)),
            bytes_words(lun.rates.bytes_s(name)),
            latency_words(recent.mean_us),
            *(latency_words(recent.percentile_us(each)) for each in (50, 99, 99.9)),
            count_words(total.errors),
        )
        shown = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row" class="name">{name}</th>{shown}</tr>\n')
    return (
        f'<table class="small"><thead><tr>{row}</tr></thead>\n<tbody>\n{"".join(lines)}</tbody>'
        '</table>\n<p class="faint">Latencies are of the last minute; failed: since the LUN was '
        "opened.</p>\n"
    )


def _heat(history: History, lun: LunHistory) -> str:
    """The heat map as SVG, with what it says in words."""
    now = history.look.at
    chart = heat_map(lun, now, COLUMNS, _ROWS)
    recent = lun.recent(now, slots=12)
    figures = ", ".join(
        f"p{percent:g} {latency_words(recent.percentile_us(percent))}"
        for percent in (50, 90, 99, 99.9)
    )
    words = f"{recent.requests} requests in the last minute" + (
        f": {figures}" if recent.requests else ""
    )
    span = duration_words(COLUMNS * SLOT_S)
    height = len(chart.rows) * _CELL_HEIGHT
    shapes = []
    for index, (bound, row) in enumerate(zip(chart.bounds, chart.rows, strict=True)):
        y = index * _CELL_HEIGHT
        if index % 2 == 0 or len(chart.rows) < 4:
            shapes.append(
                f'<text x="{_LABEL_WIDTH - 6}" y="{y + _CELL_HEIGHT - 2}" text-anchor="end">'
                f"{bound_words(bound)}</text>"
            )
        at = 0
        for shade, run in groupby(row):
            count = len(list(run))
            if shade:
                x = _LABEL_WIDTH + at * _CELL_WIDTH
                shapes.append(
                    f'<rect class="s{shade}" x="{x}" y="{y}" width="{count * _CELL_WIDTH}" '
                    f'height="{_CELL_HEIGHT - 1}"/>'
                )
            at += count
    for index, away in enumerate(chart.away):
        x = _LABEL_WIDTH + index * _CELL_WIDTH
        kind = "away" if away else "axis"
        shapes.append(
            f'<rect class="{kind}" x="{x}" y="{height + 1}" width="{_CELL_WIDTH}" height="3"/>'
        )
    width = _LABEL_WIDTH + COLUMNS * _CELL_WIDTH
    shapes.append(
        f'<text x="{_LABEL_WIDTH}" y="{height + 22}">{span} ago</text>'
        f'<text x="{width}" y="{height + 22}" text-anchor="end">now</text>'
    )
    return (
        f'<svg viewBox="0 -{_TOP} {width} {height + _TOP + 28}" role="img" '
        f'aria-label="latencies of the last {span}: {words}">{"".join(shapes)}</svg>\n'
        f'<p class="faint">{words}</p>\n'
    )


def _tree(lun: LunHistory, now: float) -> str:
    branches = paths_of(lun.seen.lun, lun.away_s(now), lun.state)
    return f'<ul class="tree">{_branches(branches, 0)}</ul>\n'


def _branches(branches: Sequence[Branch], depth: int) -> str:
    """The items of one depth, each with those below it."""
    found = []
    at = 0
    while at < len(branches):
        each = branches[at]
        end = at + 1
        while end < len(branches) and branches[end].depth > depth:
            end += 1
        below = branches[at + 1 : end]
        inner = f"<ul>{_branches(below, depth + 1)}</ul>" if below else ""
        kind = "faint" if each.good is None else "good" if each.good else "bad"
        found.append(
            f'<li>{_text(each.words)} <span class="{kind}">{_text(each.state)}</span>{inner}</li>'
        )
        at = end
    return "".join(found)
