"""The table of mutations: TOML files beside this module."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

PLACE = Path(__file__).resolve().parent
_FIELDS = {"name", "file", "old", "new", "tests", "loses"}
_OPTIONAL = {"world", "no_world"}


class BadTable(Exception):
    """A mutation that cannot be read, or applied. Its text begins with the mutation's name."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of ``file``, a path from the tree's top: ``old``, which stands there exactly once,
    becomes ``new``. ``tests``: paths or node ids for pytest, of which one is to fail then.
    ``loses``: what a user would lose. ``world``: scripts/simulate finds it without any test, with
    these settings (KEY=VALUE, in words; "": whatever the seed draws). ``no_world``: why it does
    not."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    loses: str
    world: str | None = None
    no_world: str | None = None

    def changed(self, text: str) -> str:
        """``text``, of the file, with the change. Raises BadTable where it cannot be applied."""
        count = text.count(self.old)
        if count != 1:
            raise BadTable(
                f"{self.name}: the old text stands in {self.file} {count} times, not once: write "
                "down what stands there now, or remove the mutation"
            )
        changed = text.replace(self.old, self.new)
        try:
            same = ast.dump(ast.parse(text)) == ast.dump(ast.parse(changed))
        except SyntaxError as error:
            raise BadTable(f"{self.name}: {self.file} is no Python then: {error}") from None
        if same:
            raise BadTable(f"{self.name}: the new text of {self.file} means the same")
        return changed

    def fits(self, patterns: Sequence[str]) -> bool:
        return not patterns or any(
            fnmatch(self.name, each) or fnmatch(self.file, each) for each in patterns
        )


def read_table(place: Path = PLACE) -> list[Mutation]:
    """All mutations, by file and in the order in which they stand there. Raises BadTable."""
    found: list[Mutation] = []
    for path in sorted(place.glob("*.toml")):
        with path.open("rb") as file:
            try:
                rows = tomllib.load(file).get("mutation", [])
            except tomllib.TOMLDecodeError as error:
                raise BadTable(f"{path.name}: {error}") from None
        for row in rows:
            name = row.get("name", f"{path.name}, a mutation without a name")
            if set(row) - _OPTIONAL != _FIELDS:
                wrong = ", ".join(sorted(_FIELDS ^ (set(row) - _OPTIONAL)))
                raise BadTable(f"{name}: a key that is missing, or not known: {wrong}")
            if any(each.name == name for each in found):
                raise BadTable(f"{name}: two mutations have this name")
            if not row["tests"]:
                raise BadTable(f"{name}: names no test")
            if set(row) >= _OPTIONAL:
                raise BadTable(f"{name}: the simulation finds it, or does not: take a key away")
            found.append(Mutation(**{**row, "tests": tuple(row["tests"])}))
    return found
