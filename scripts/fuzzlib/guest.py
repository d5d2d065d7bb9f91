"""``python -m fuzzlib.guest TARGET CORPUS OPTION…``: one target under atheris. The options are
libFuzzer's."""

from __future__ import annotations

import importlib
import logging
import sys

import atheris


def main(name: str, words: list[str]) -> None:
    # First the package alone, which chooses the form of its modules: its finder has to come behind
    # that of atheris.
    importlib.import_module("iserblk")
    with atheris.instrument_imports(include=["iserblk"]):
        from tests.fuzz import guided, table  # noqa: PLC0415
    atheris.instrument_func(table.planted)  # which is in no module of iserblk
    logging.disable(logging.CRITICAL)
    row = table.ROWS.get(name, table.PLANTED)

    def one(data: bytes) -> None:
        guided.run_input(row, data)

    atheris.Setup([sys.argv[0], *words], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
