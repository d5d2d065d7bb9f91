"""Compiles what pays: ``setup.py build_ext --inplace``. Everything works without: more slowly, and
over RDMA devices without memory windows. With ISERBLK_PLAIN=1 the modules of ``iserblk.forms``
are left out. ISERBLK_OPTIMIZE: the level of gcc's optimisation for these modules; the default is
1 (docs/compiled.md). ISERBLK_PROGRESS: the number of an open file descriptor to which is written
how far it is.

A C file that is compiled already, as it is and with the same options, is not compiled again: after
an edit these are those whose C code has changed. Their objects are in build/.

Also names the files that a wheel installs outside of Python's packages, below share/: what
scripts/install-units needs, the documents, which messages and manual pages name, and the manual
pages and completions, if there is a directory share/ with them (``scripts/manpages --output .``).
"""

import gc
import hashlib
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Lock

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

PROCESSORS = len(os.sched_getaffinity(0))
PAGES = (".md", ".svg", ".png", ".yaml")  # of docs/, what users read
MANY = 10  # C files, for which it pays to compile a header before them
INCLUDES = re.compile(r"(#include .*\n)+")  # at the beginning of a C file
# What the library has for itself is reached without a look into a table.
LOCAL = ("-fvisibility=hidden",)
# Of -O1, what takes some of the compiler's time, and saves no instructions (docs/compiled.md).
LEFT_OUT = ("-fno-tree-pta",)
NO_MODULES = {"sdist", "egg_info", "dist_info"}  # commands that build no module, but ask for them


class Progress:
    """Tells how far the compiling is: in one line of a terminal, and else in a line for each
    quarter."""

    def __init__(self) -> None:
        number = os.environ.get("ISERBLK_PROGRESS", "")
        self._file = os.fdopen(int(number), "w", closefd=False) if number else None
        self._in_place = self._file is not None and self._file.isatty()
        self._lock = Lock()
        self._done = self._all = self._quarters = 0

    def say(self, text: str, last: bool = True) -> None:
        if self._file is not None:
            end = "\n" if last or not self._in_place else ""
            start = "\r\033[K" if self._in_place else ""
            print(f"{start}setup: {text}", end=end, file=self._file, flush=True)

    def begin(self, files: int) -> None:
        self._all = files

    def compiled(self) -> None:
        """One file more."""
        with self._lock:
            self._done += 1
            quarters = 4 * self._done // self._all
            if self._in_place or quarters > self._quarters:
                self._quarters = quarters
                self.say(f"compiled {self._done} of {self._all} C files", self._done == self._all)


PROGRESS = Progress()


class Modules(Distribution):
    """Its modules are made only when a command builds them (``Build``): others, and --help, would
    wait for mypyc."""

    def has_ext_modules(self) -> bool:
        return not NO_MODULES & set(self.commands)


class Build(build_ext):
    """Compiles the C files of one extension at the same time. setuptools does that with extensions,
    and nearly all of ours are in one."""

    def finalize_options(self) -> None:
        if not self.distribution.ext_modules:
            self.distribution.ext_modules = extensions()
        super().finalize_options()

    def build_extensions(self) -> None:
        PROGRESS.begin(sum(len(ext.sources) for ext in self.extensions))
        # What every object depends on, beside its source and its headers.
        asked = subprocess.run(
            [*self.compiler.compiler_so[:1], "--version"], capture_output=True, check=False
        )
        tools = [sys.version, version("mypy"), version("cython"), *self.compiler.compiler_so]
        self._tools = asked.stdout + "\0".join(tools).encode()
        self._headers: dict[tuple[str, ...], str] = {}
        alike = Counter[tuple[str, ...]]()
        for ext in self.extensions:
            around = self._around(ext)
            alike.update(
                self._reading(ext, source)
                for source in ext.sources
                if not self._is_made(source, self._state(source, around))
            )
        for reading, files in alike.items():
            if reading[0] and files >= MANY:
                self._read_once(reading)
        super().build_extensions()
        for header in self._headers.values():
            Path(f"{header}.gch").unlink(missing_ok=True)  # of 20 MB

    def build_extension(self, ext: Extension) -> None:
        for path in self.compiler.object_filenames(ext.sources, output_dir=self.build_temp):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        around = self._around(ext)
        # The longest first, so that no processor is left alone with one at the end.
        sources = sorted(ext.sources, key=os.path.getsize, reverse=True)
        with ThreadPool(PROCESSORS) as pool:
            made = pool.map(lambda source: self._compile(ext, source, around), sources, chunksize=1)
        ext.extra_objects = sorted(path for path, _ in made)
        if any(anew for _, anew in made):  # setuptools compares times, in whole seconds
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        ext.sources = []
        super().build_extension(ext)

    def copy_extensions_to_source(self) -> None:
        """The library last: as long as it is not there, the sources run, and not a part of them
        beside compiled modules that know the layout of all."""
        library = runpy.run_path("iserblk/forms.py")["LIBRARY"]
        self.extensions.sort(key=lambda ext: ext.name == library)
        super().copy_extensions_to_source()

    def copy_file(self, infile: str, outfile: str, *words: object, **named: object) -> object:
        """In one step: after an interruption, half a file would pass for current."""
        part = f"{outfile}.new"
        made = super().copy_file(infile, part, *words, **named)
        os.replace(part, outfile)
        return outfile, made[1]

    def _reading(self, ext: Extension, source: str) -> tuple[str, ...]:
        """What a C file includes first, and what the compiler is told beside."""
        folders = [*self.compiler.include_dirs, *ext.include_dirs]
        begin = INCLUDES.match(Path(source).read_text(errors="replace"))
        return (
            begin[0] if begin else "",
            *ext.extra_compile_args,
            *(f"-I{each}" for each in folders),
        )

    def _read_once(self, reading: tuple[str, ...]) -> None:
        """Compile what many C files include first, headers that guard against being read twice. gcc
        takes that in place of them; without it each file has them read once more."""
        names, *words = reading
        header = Path(self.build_temp, f"included-{len(self._headers)}.h")
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(names)
        compiled = [*self.compiler.compiler_so, *words, "-x", "c-header", str(header)]
        made = subprocess.run([*compiled, "-o", f"{header}.gch"], capture_output=True, check=False)
        if made.returncode == 0:
            self._headers[reading] = str(header)

    def _object(self, source: str) -> tuple[str, Path]:
        """Where a C file's object belongs, and what tells of what it was made."""
        (made,) = self.compiler.object_filenames([source], output_dir=self.build_temp)
        return str(made), Path(f"{made}.sha256")

    def _around(self, ext: Extension) -> bytes:
        """Stands for all that the objects of an extension are made of, beside their C files."""
        known = self._tools + "\0".join([*ext.extra_compile_args, *ext.include_dirs]).encode()
        headers = hashlib.sha256(known)
        for path in sorted(set(ext.depends)):
            headers.update(Path(path).read_bytes())
        return headers.digest()

    def _state(self, source: str, around: bytes) -> str:
        return hashlib.sha256(around + Path(source).read_bytes()).hexdigest()

    def _is_made(self, source: str, state: str) -> bool:
        made, stamp = self._object(source)
        return os.path.exists(made) and stamp.exists() and stamp.read_text() == state

    def _compile(self, ext: Extension, source: str, around: bytes) -> tuple[str, bool]:
        """The object of a C file: what is there, if it was made of the same; and whether it was
        made now."""
        state = self._state(source, around)
        made, stamp = self._object(source)
        anew = not self._is_made(source, state)
        if anew:
            stamp.unlink(missing_ok=True)
            header = self._headers.get(self._reading(ext, source))
            before = ["-include", header] if header else []
            self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                debug=self.debug,
                extra_postargs=[*ext.extra_compile_args, *before],
                depends=ext.depends,
            )
            stamp.write_text(state)
        PROGRESS.compiled()
        return made, anew


def extensions() -> list[Extension]:
    level = os.environ.get("ISERBLK_OPTIMIZE", "1")
    if os.environ.get("ISERBLK_PLAIN", "0") not in ("", "0"):
        return of_cython(level)
    # mypy's trees have millions of objects: the process that has made them ends without looking for
    # circles among them, and without freeing each, which would take half as long as the work.
    beside = multiprocessing.get_context("fork")  # pip runs this file as no module: no other can
    here, there = beside.Pipe(duplex=False)
    process = beside.Process(target=lambda: there.send(of_mypyc(level)))
    process.start()
    there.close()
    others = of_cython(level)
    try:
        library = here.recv()
    except EOFError:  # it has printed why
        process.join()
        sys.exit(process.exitcode or 1)
    process.join()
    return [*others, *library]


def of_cython(level: str) -> list[Extension]:
    from Cython.Build import cythonize  # noqa: PLC0415 (only to compile)

    modules = [
        Extension("iserblk.sockets._syscalls", ["iserblk/sockets/_syscalls.pyx"]),
        Extension("iserblk._octets", ["iserblk/_octets.pyx"]),
        Extension("iserblk._files", ["iserblk/_files.pyx"]),
        # A plain module, with C types beside it.
        Extension(
            "iserblk.disk.durability._copies",
            ["iserblk/disk/durability/copies.py"],
            depends=["iserblk/disk/durability/_copies.pxd"],
        ),
    ]
    if Path("/usr/include/isa-l/crc.h").exists():
        modules.append(Extension("iserblk._crc", ["iserblk/_crc.pyx"], libraries=["isal"]))
        frames = "iserblk/rcap/iwarp/_frames.pyx"
        modules.append(Extension("iserblk.rcap.iwarp._frames", [frames], libraries=["isal"]))
    if all(
        (Path("/usr/include") / header).exists()
        for header in ("infiniband/verbs.h", "rdma/rdma_cma.h")
    ):
        modules.append(
            Extension(
                "iserblk.rcap.verbs._gaps",
                ["iserblk/rcap/verbs/_gaps.pyx"],
                libraries=["ibverbs", "rdmacm"],
            )
        )
    for module in modules:  # as mypycify's; -g1: names and lines, no variables
        module.extra_compile_args += [f"-O{level}", "-g1"]
    made = cythonize(
        modules,
        compiler_directives={"language_level": "3", "annotation_typing": False},
        build_dir="build",
    )
    return list(made)


def of_mypyc(level: str) -> list[Extension]:
    """What the modules of iserblk/forms.py become, with the library that has their code."""
    gc.disable()
    from mypyc.build import mypycify  # noqa: PLC0415 (only to compile)

    forms = runpy.run_path("iserblk/forms.py")
    sources = [str(Path(*module.split(".")).with_suffix(".py")) for module in forms["MODULES"]]
    PROGRESS.say(f"reading the types of {len(sources)} modules")
    compiled = mypycify(
        ["--config-file=pyproject.toml", *sources],
        opt_level=level,
        multi_file=True,  # for several processors (Build)
        group_name=forms["LIBRARY"].removesuffix("__mypyc"),
    )
    more = [*LOCAL, *(LEFT_OUT if level == "1" else ())]
    for module in compiled:
        module.extra_compile_args = [*module.extra_compile_args, *more]
    return list(compiled)


def data_files() -> list[tuple[str, list[str]]]:
    """Directories below the prefix, and the files that come there."""
    found = [
        ("share/iserblk", ["scripts/install-units"]),
        ("share/iserblk/systemd", sorted(map(str, Path("scripts/systemd").iterdir()))),
    ]
    found.append(("share/iserblk/monitoring", sorted(map(str, Path("monitoring").iterdir()))))
    for folder, _, names in sorted(os.walk("docs")):
        pages = [each for each in names if each.endswith(PAGES) or each == "target.toml"]
        place = os.path.join("share/doc/iserblk", os.path.relpath(folder, "docs"))
        found.append(
            (os.path.normpath(place), sorted(os.path.join(folder, each) for each in pages))
        )
    examples = sorted(str(path) for path in Path("examples").glob("*.*"))
    found.append(("share/doc/iserblk/examples", examples))
    for folder, _, names in sorted(os.walk("share")):
        if names:
            found.append((folder, sorted(os.path.join(folder, name) for name in names)))
    return found


setup(
    distclass=Modules,
    ext_modules=[],
    data_files=data_files(),
    options={"build_ext": {"parallel": PROCESSORS}},
    cmdclass={"build_ext": Build},
)
