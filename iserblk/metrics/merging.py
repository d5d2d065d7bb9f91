"""One text of several: the metrics of processes, with labels that say whose they are.

The texts are not trusted. Of each, only samples get through that ``expose`` of this version tells,
with exactly its labels and values of their kinds; the heads (HELP and TYPE) are always ours. So no
text can spoil what others tell, or add a label of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from iserblk.errors import RemoteProtocolError
from iserblk.metrics.exposition import expose
from iserblk.metrics.reading import ConnectionReading, LunReading, PathReading, ProcessReading
from iserblk.metrics.target_reading import AddressReading, TargetLunReading, TargetReading

# With every metric.
_CONNECTION = ConnectionReading(0, "", "")
_PATH = PathReading(0, "p", state=0)
_LUN = LunReading(
    "t", 0, "d", "u", 0, "p", "p", True, per_connection=(_CONNECTION,), paths=(_PATH,)
)
_TARGET = TargetReading(
    "t", "u", addresses=(AddressReading("a", 0),), luns=(TargetLunReading(0, 0, 0),)
)
_WHOLE = ProcessReading(1, "1", (_LUN,), (_TARGET,))
# What the values of labels look like; of those that are not here, any text.
_VALUES = {
    "lun": r"\d{1,5}",
    "cid": r"\d{1,5}",
    "path": r"\d{1,5}",
    "pid": r"\d{1,10}",
    "operation": r"[a-z]{1,20}",
    "le": r"\d{1,3}(?:\.\d{1,9})?|\+Inf",
}
_TEXT = r'(?:[^"\\\n]|\\[\\"n]){0,1000}'
# Before version 0.26 prometheus_client writes three digits where two would do: 1e+010.
_NUMBER = r"\d{1,20}(?:\.\d{1,20})?(?:e[+-]0?\d{2})?"


@dataclass(slots=True, frozen=True)
class _Sample:
    """``family``: the index of its head. ``line``: what its lines match."""

    family: int
    line: re.Pattern[str]


@cache
def _known() -> tuple[tuple[str, ...], dict[str, _Sample]]:
    """The heads of the families, and all samples by name."""
    heads: list[str] = []
    samples: dict[str, _Sample] = {}
    for line in expose(lambda: _WHOLE).decode().splitlines():
        if line.startswith("# HELP "):
            heads.append(f"{line}\n")
        elif line.startswith("#"):
            heads[-1] += f"{line}\n"
        else:
            name, _, rest = line.partition("{")
            labels = re.findall('([a-z_]+)="', rest)
            values = ",".join(f'{each}="(?:{_VALUES.get(each, _TEXT)})"' for each in labels)
            pattern = re.compile(rf"{name}\{{{values}\}} {_NUMBER}", re.ASCII)
            samples.setdefault(name, _Sample(len(heads) - 1, pattern))
    return tuple(heads), samples


def escaped(value: str) -> str:
    """``value`` as it stands between the quotes of a label. What is no text is replaced."""
    value = value.encode(errors="replace").decode()
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Merger:
    """Collects texts. At the end, ``text`` has them all, family by family."""

    def __init__(self) -> None:
        self._heads, self._samples = _known()
        self._lines: list[list[str]] = [[] for _ in self._heads]

    def take_untrusted(self, labels: str, text: str) -> None:
        """Add the samples of one process, each with ``labels`` (``name="value",…``). Raises
        RemoteProtocolError; nothing of the text is added then."""
        seen: set[str] = set()
        found: list[tuple[int, str]] = []
        for line in text.split("\n"):
            name, _, rest = line.partition("{")
            sample = self._samples.get(name)
            if sample is None:
                continue  # a comment, or a metric of a later version
            series = line.rpartition("}")[0]
            if not sample.line.fullmatch(line) or series in seen:
                raise RemoteProtocolError(
                    "Prometheus", f"a line of {name} is wrong, or there twice"
                )
            seen.add(series)
            found.append((sample.family, f"{name}{{{labels},{rest}\n"))
        if not found:
            raise RemoteProtocolError("Prometheus", "these are not the metrics of iserblk")
        for family, line in found:
            self._lines[family].append(line)

    def text(self) -> str:
        return "".join(
            head + "".join(lines)
            for head, lines in zip(self._heads, self._lines, strict=True)
            if lines
        )
