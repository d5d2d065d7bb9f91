"""What came of a soak, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from soaklib.judging import RULE, Life
from soaklib.latencies import Latencies
from soaklib.tried import Counts, Replays, rows

_MOST_ROWS = 30  # of minutes; where there are more, several are one row


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join((first, *others)).rstrip()


def processes(lives: Sequence[Life]) -> Iterator[str]:
    """A row for each process that was judged; a row for those of a name that lived too short."""
    rows = []
    short: dict[str, list[Life]] = {}
    for life in lives:
        if life.begin is None or life.end is None:
            short.setdefault(life.name, []).append(life)
            continue
        cells = [f"{life.begin[0] / 2**20:.1f} → {life.end[0] / 2**20:.1f}"]
        cells += [f"{life.begin[index]} → {life.end[index]}" for index in (1, 2)]
        verdict = "grows" if [*life.findings()] else "flat"
        rows.append([life.name, f"{life.seconds / 60:.0f}", *cells, verdict])
    for name, several in short.items():
        samples = [each for life in several for each in life.samples]
        cells = [f"{min(each.memory for each in samples) / 2**20:.1f} to "
                 f"{max(each.memory for each in samples) / 2**20:.1f}"]  # fmt: skip
        for values in ([each.descriptors for each in samples], [each.threads for each in samples]):
            cells.append(f"{min(values)} to {max(values)}")
        count = f"not judged ({len(several)} of them)" if len(several) > 1 else "not judged"
        longest = max(life.seconds for life in several)
        rows.append([name, f"{longest / 60:.0f}", *cells, count])
    head = ("process", "minutes", "memory (MiB)", "descriptors", "threads", "verdict")
    yield from _table(head, rows)
    if any(life.begin is not None for life in lives):
        yield RULE
    else:
        yield "Flatness was not judged: no process has lived for 20 minutes."


def initiators(total: Mapping[str, Counts], replayed: Mapping[str, Replays]) -> Iterator[str]:
    """A row for each initiator: what it went through."""
    yield "Initiators: reconnections of the session, connections lost beside others, commands sent"
    yield "again, flushes, journals sent again (where a cache was, or may be, lost), changes"
    head = ("initiator", "reconnections", "recoveries", "resent", "flushes", "replays", "changes")
    yield from _table(head, [*rows(total, replayed)])


def latencies(minutes: Mapping[str, Mapping[int, Latencies]]) -> Iterator[str]:
    """Of each client: median, 99th percentile and longest, in milliseconds."""
    names = sorted(name for name, each in minutes.items() if any(m.count for m in each.values()))
    if not names:
        return
    last = max(minute for name in names for minute in minutes[name])
    step = -(-(last + 1) // _MOST_ROWS)
    rows = []
    for first in range(0, last + 1, step):
        row = [f"{first}" if step == 1 else f"{first} to {first + step - 1}"]
        for name in names:
            found = Latencies()
            for minute in range(first, first + step):
                if minute in minutes[name]:
                    found.merge(minutes[name][minute])
            row.append(_three(found))
        rows.append(row)
    total = ["all"]
    for name in names:
        found = Latencies()
        for each in minutes[name].values():
            found.merge(each)
        total.append(f"{found.count}: {_three(found)}")
    yield "Latencies in ms: median, 99th percentile, longest (in the last row, requests before)"
    yield from _table(("minute", *names), [*rows, total])


def _three(found: Latencies) -> str:
    if not found.count:
        return "-"
    return " ".join(_number(found.percentile(percent)) for percent in (50, 99, 100))


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:.0f}"
