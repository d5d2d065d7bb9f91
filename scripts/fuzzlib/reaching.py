"""``python -m fuzzlib.reaching CORPUS TARGET…``: which lines of iserblk's functions the inputs of
the targets reach, as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fuzzlib.running import TOP, folder
from tests.fuzz import guided
from tests.fuzz.table import PLANTED, ROWS

_ROOT = f"{TOP / 'iserblk'}/"


def _functions(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & 0x2:  # CO_NEWLOCALS: of a function, and of no class
                yield each
            yield from _functions(each)


def _lines(path: str) -> int:
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    return len(
        {
            line
            for each in _functions(code)
            for _, _, line in each.co_lines()
            if line is not None and line > each.co_firstlineno
        }
    )


def main(corpus: Path, names: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    seen: dict[str, set[int]] = {}

    def inside(frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            seen[frame.f_code.co_filename].add(frame.f_lineno)
        return inside

    def entered(frame: FrameType, _event: str, _arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_ROOT):
            return None
        seen.setdefault(name, set())
        return inside

    for name in names:
        row = ROWS.get(name, PLANTED)
        for file in sorted((corpus / folder(name)).iterdir()):
            data = file.read_bytes()
            sys.settrace(entered)
            try:
                guided.run_input(row, data)
            except Exception as error:  # what was found has been told
                logging.debug("%s: %s", file, error)
            finally:
                sys.settrace(None)
    found = {
        path.removeprefix(f"{TOP}/"): (len(lines), _lines(path)) for path, lines in seen.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
