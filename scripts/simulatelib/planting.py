"""Changes a module of iserblk before it is imported: to show that a bug is found."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, name: str, path: Path, text: str) -> None:
        self._name = name
        self._path = str(path)
        self._text = text

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        loader = _Loader(name, self._path, self._text)
        return spec_from_file_location(name, self._path, loader=loader)


def plant(path: Path, top: Path, text: str) -> None:
    """From now on the module of the file ``path`` has this text, and no module is compiled. It must
    not be imported yet."""
    os.environ["ISERBLK_PLAIN"] = "1"
    importlib.import_module("iserblk")  # which chooses the form; its finder comes behind ours
    name = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
    assert name not in sys.modules, f"{name} is imported already"
    sys.meta_path.insert(0, _Finder(name, path, text))
