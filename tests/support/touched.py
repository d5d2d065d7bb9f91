"""``python -m tests.support.touched REPORT ARGUMENT…``: iserblk, which counts the bytes it touches.

Runs ``iserblk ARGUMENT…`` in its plain form, with each expression that copies bytes counted. After
each SIGUSR1, and at its end, the file REPORT has the counts since the one before (JSON; it takes
the name when it is complete): by "MODULE.FUNCTION KIND" the bytes. MODULE is without "iserblk.".

    copy      what is copied in memory: ``x[a:b] = data``, ``bytes(data)``, slices of bytes, …
    fresh     memory that is allocated and filled with zeros: ``bytearray(n)``
    crc       what a CRC32C is computed of
    receive   from a socket, send   to a socket: copies of the kernel
    read      from a file, write    to a file: the same

System calls count for the first function below ``iserblk.sockets`` and other wrappers.

How it works: the modules are read by a loader of this module, which puts a call around each such
expression, in front of compiling. Modules in C that copy are kept from being imported: those
written in Python take their place. What libraries and interpreter copy by themselves is not seen.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

COPY, FRESH, CRC, RECEIVE, SEND, READ, WRITE = (
    "copy", "fresh", "crc", "receive", "send", "read", "write",
)  # fmt: skip
_IN_C = (
    "iserblk._files",
    "iserblk._octets",
    "iserblk.disk.durability._copies",
    "iserblk.rcap.iwarp._frames",
    "iserblk.sockets._syscalls",
)
_WRAPPERS = ("iserblk.files", "iserblk.sockets.", "iserblk.nbd.tls")
_ROOTS = ("iserblk.", "fuse_mount.")
_BYTES = (bytes, bytearray, memoryview)

counts: Counter[str] = Counter()


def _note(kind: str, size: int, frame: FrameType) -> None:
    module = frame.f_globals["__name__"].removeprefix("iserblk.")
    counts[f"{module}.{frame.f_code.co_qualname} {kind}"] += size


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, memoryview) else len(value)


# -- what is called in place of the expressions ----------------------------------------------------


def _copied(value: Any) -> Any:
    """``value`` is about to be copied, if it is bytes."""
    if isinstance(value, _BYTES):
        _note(COPY, _size(value), sys._getframe(1))
    return value


def _made(value: Any) -> Any:
    """An operation has made ``value``: if it is bytes, of other bytes."""
    if isinstance(value, (bytes, bytearray)):
        _note(COPY, len(value), sys._getframe(1))
    return value


def _built(kind: Callable[[Any], bytes | bytearray], source: Any) -> bytes | bytearray:
    """In place of ``bytes(source)`` and ``bytearray(source)``."""
    value = kind(source)
    _note(FRESH if isinstance(source, int) else COPY, len(value), sys._getframe(1))
    return value


_COPIED, _MADE, _BUILT = "__touched_copied__", "__touched_made__", "__touched_built__"
_MAKING = ("join", "tobytes", "ljust")


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])


class _Counting(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if any(
            isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Slice)
            for each in node.targets
        ):
            node.value = _call(_COPIED, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call(_COPIED, node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return _call(_MADE, node) if isinstance(node.op, (ast.Add, ast.Mult)) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        cuts = isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Slice)
        return _call(_MADE, node) if cuts else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="bytes" | "bytearray"), args=[source], keywords=[]):
                return _call(_BUILT, node.func, source)
            case ast.Call(func=ast.Attribute(attr=name)) if name in _MAKING:
                return _call(_MADE, node)
        return node

    def _as_it_is(self, node: ast.AST) -> ast.AST:
        return node

    # Annotations are no expressions that run.
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    visit_arg = visit_arguments = _as_it_is


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Counting().visit(ast.parse(self.get_data(path), path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _IN_C:
            raise ImportError(f"{fullname}: its copies are not seen", name=fullname)
        if not fullname.startswith(_ROOTS) or path is None:
            return None
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            return None
        source = Path(found.origin)
        if source.suffix != ".py":
            source = source.with_name(f"{source.name.partition('.')[0]}.py")
            if not source.exists():
                return None
        return spec_from_file_location(
            fullname,
            source,
            loader=_Loader(fullname, str(source)),
            submodule_search_locations=found.submodule_search_locations,
        )


# -- system calls, and the CRC ---------------------------------------------------------------------


def _ours() -> FrameType | None:
    """The function that has called, wrappers left out; None: none of iserblk."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_ROOTS) and not name.startswith(_WRAPPERS):
            return frame
        if not name.startswith((*_ROOTS, __name__)):
            return None
        frame = frame.f_back
    return None


def _counted(kind: str, call: Callable[..., Any], size: Callable[[Any], int]) -> Any:
    def counting(*arguments: Any) -> Any:
        result = call(*arguments)
        frame = _ours()
        if frame is not None:
            _note(kind, size(result), frame)
        return result

    return counting


def _itself(result: int) -> int:
    return result


def _first(result: tuple[int, Any]) -> int:
    return result[0]


def _count_calls() -> None:
    for place, name, kind, size in (
        (os, "preadv", READ, _itself),
        (os, "pwritev", WRITE, _itself),
        (socket.socket, "recv_into", RECEIVE, _itself),
        (socket.socket, "recvmsg_into", RECEIVE, _first),
        (socket.socket, "recv", RECEIVE, len),
        (socket.socket, "send", SEND, _itself),
        (socket.socket, "sendmsg", SEND, _itself),
    ):
        setattr(place, name, _counted(kind, getattr(place, name), size))
    import iserblk.crc  # noqa: PLC0415 (behind the finder)

    plain = iserblk.crc.crc32c

    def crc32c(data: Any, value: int = 0) -> int:
        _note(CRC, _size(data), sys._getframe(1))
        return plain(data, value)

    iserblk.crc.crc32c = crc32c


# -- running ---------------------------------------------------------------------------------------


def _tell(report: Path) -> None:
    # Not cleared: the signal may have come in the midst of an addition.
    global counts
    told, counts = counts, Counter()
    now = report.with_suffix(".new")
    now.write_text(json.dumps(dict(told)))
    now.replace(report)


def main() -> int:
    os.environ["ISERBLK_PLAIN"] = "1"
    report = Path(sys.argv[1])
    sys.argv[1:] = sys.argv[2:]
    import iserblk  # noqa: F401, PLC0415 (it puts a finder in front, too)

    vars(builtins).update({_COPIED: _copied, _MADE: _made, _BUILT: _built})
    sys.meta_path.insert(0, _Finder())
    _count_calls()
    signal.signal(signal.SIGUSR1, lambda *_: _tell(report))
    atexit.register(_tell, report)
    from iserblk.cli.main import main as run  # noqa: PLC0415

    return run()


if __name__ == "__main__":
    sys.exit(main())
