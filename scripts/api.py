"""Builds api-reference.md: the classes and functions of the Python API, with docstrings.

    scripts/api.py [--output DIR]      the default is build/docs

The status is 1 if a section of the reference, or an error that iserblk raises, has no docstring.
"""

from __future__ import annotations

import inspect
import re
import sys
from types import FunctionType

from documents import built

from iserblk import errors
from iserblk.disk import aio, asyncio, blocking, file, request_queue, seam
from iserblk.scsi.sense import Sense

HEAD = """# The Python API

For those who write Python. Made by scripts/api.py from the docstrings of the code. [api.md](api.md)
says how to use it, with examples.
"""

# (heading, object, name of it for users). Of a class, its methods follow.
SECTIONS: list[tuple[str, object, str]] = [
    ("Opening disks, for threads", blocking.open_disks, "iserblk.open_disks"),
    ("Opened disks", blocking.ThreadDiskSet, "ThreadDiskSet"),
    ("Opening disks, for trio", aio.open_disks, "iserblk.aio.open_disks"),
    ("Opened disks, for trio", aio.TrioDiskSet, "TrioDiskSet"),
    ("Opening disks, for asyncio", asyncio.open_disks, "iserblk.asyncio.open_disks"),
    ("A disk", seam, ""),
    ("A disk, for threads", seam.BlockingDisk, "BlockingDisk"),
    ("Files and commands, for threads", seam.BlockingLun, "BlockingLun"),
    ("A disk, for trio", seam.AsyncDisk, "AsyncDisk"),
    ("Commands, for trio", seam.AsyncLun, "AsyncLun"),
    ("Many requests of one task", request_queue, ""),
    ("Opening a queue of requests", request_queue.open_queue, "iserblk.aio.open_queue"),
    ("A queue of requests", request_queue.RequestQueue, "RequestQueue"),
    ("A request", request_queue.Request, "Request"),
    ("A disk, for asyncio", asyncio.AsyncioDisk, "AsyncioDisk"),
    ("What a LUN is", seam.LunInfo, "LunInfo"),
    ("A file", file, ""),
    ("A file without a buffer", file.DiskFile, "DiskFile"),
    ("How a command ended", seam.CommandResult, "iserblk.CommandResult"),
    ("Sense data", Sense, "Sense"),
    ("Errors", errors, ""),
]
_INDENTED = re.compile(r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", re.M)
_ANNOTATION = re.compile(r"(: |-> )'([^']*)'")  # as ``from __future__ import annotations`` has it
_FIELD = re.compile(r"    [a-z_]+: ")


def words(text: str) -> str:
    """A docstring as Markdown: names in single backticks, indented text as a block of code."""
    text = inspect.cleandoc(text) + "\n"
    parts = []
    at = 0
    for found in _INDENTED.finditer(text):
        parts += [text[at : found.start()].replace("``", "`"), "```\n"]
        parts += [inspect.cleandoc("\n" + found[0]), "\n```\n"]
        at = found.end()
    return "".join([*parts, text[at:].replace("``", "`")])


def signature(function: object, name: str) -> str:
    assert callable(function)
    inner = inspect.unwrap(function)
    shown = _ANNOTATION.sub(r"\1\2", str(inspect.signature(inner)))
    shown = shown.replace("(self, ", "(").replace("(self)", "()").replace("'", '"')
    if inspect.isasyncgenfunction(inner):
        return f"async with {name}{shown}"
    if "." in name:
        return f"{name}{shown}"
    return f"{'async def' if inspect.iscoroutinefunction(inner) else 'def'} {name}{shown}"


def own(kind: type) -> list[tuple[str, object]]:
    """The public methods and properties that the class itself has, in the order of its source,
    without those that are there for another part of iserblk."""
    return [
        (name, each)
        for name, each in vars(kind).items()
        if not name.startswith("_") and isinstance(each, (FunctionType, property))
        if not (each.__doc__ or "").startswith("Implements ")
    ]


def fields(kind: type) -> str:
    """The lines of a class's source that name its fields, with their comments."""
    source = inspect.getsource(kind).partition('"""\n')[2]
    lines = []
    for line in source.splitlines():
        if line.startswith(("    def ", "    async def ", "    @")):
            break
        lines.append(line)
    text = inspect.cleandoc("\n" + "\n".join(lines)).strip()
    return code([text]) if _FIELD.match(f"    {text}") else ""


def members(kind: type) -> str:
    out: list[str] = []
    bare: list[str] = []  # those without words of their own stand together
    for name, each in own(kind):
        if isinstance(each, property):
            assert each.fget is not None
            returns = str(inspect.signature(each.fget).return_annotation)
            head, doc = f"{name}: {returns}", each.fget.__doc__
        else:
            head, doc = signature(each, name), getattr(each, "__doc__", None)
        if not doc:
            bare.append(head)
            continue
        out += [code(bare), code([head]), f"\n{words(doc)}"]
        bare = []
    return "".join([*out, code(bare)])


def code(lines: list[str]) -> str:
    text = "\n".join(lines)
    return f"\n```python\n{text}\n```\n" if text else ""


def document() -> str:
    out = [HEAD]
    for title, thing, name in SECTIONS:
        doc = inspect.getdoc(thing)
        assert doc, f"{name} has no docstring"
        out.append(f"\n## {title}\n\n")
        if isinstance(thing, type):
            out.append(f"`class {name}`\n\n{words(doc)}{fields(thing)}{members(thing)}")
        elif name:
            out.append(f"```python\n{signature(thing, name)}\n```\n\n{words(doc)}")
        else:
            out.append(words(doc))
    return "".join(out)


def undocumented() -> list[str]:
    """What is public and has no docstring, one line each."""
    things = [(name or title, thing) for title, thing, name in SECTIONS]
    things += [(f"iserblk.errors.{name}", each) for name, each in vars(errors).items()
               if isinstance(each, type) and each.__module__ == errors.__name__]  # fmt: skip
    return [f"{name} has no docstring" for name, thing in things if not inspect.getdoc(thing)]


def made() -> tuple[str, list[str]]:
    wrong = undocumented()
    return ("" if wrong else document()), wrong


if __name__ == "__main__":
    sys.exit(built("api", __doc__, "api-reference.md", made))
