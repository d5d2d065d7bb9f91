"""Compiles what pays: ``setup.py build_ext --inplace``. Everything works without: more slowly, and
over RDMA devices without memory windows. With ISERBLK_PLAIN=1 the modules of ``iserblk.forms``
are left out. ISERBLK_OPTIMIZE: the level of gcc's optimisation for these modules; the default is
2.

Also names the files that a wheel installs outside of Python's packages, below share/: what
scripts/install-units needs, the documents, which messages and manual pages name, and the manual
pages and completions, if there is a directory share/ with them (``scripts/manpages --output .``).
"""

import os
import runpy
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PROCESSORS = len(os.sched_getaffinity(0))
PAGES = (".md", ".svg", ".yaml")  # of docs/, what users read
NO_MODULES = {"sdist", "egg_info", "dist_info"}  # commands that look at no compiled module


class Build(build_ext):
    """Compiles the C files of one extension at the same time. setuptools does that with extensions,
    and nearly all of ours are in one."""

    def build_extension(self, ext: Extension) -> None:
        if len(ext.sources) > 1:
            for path in self.compiler.object_filenames(ext.sources, output_dir=self.build_temp):
                os.makedirs(os.path.dirname(path), exist_ok=True)
            # The longest first, so that no processor is left alone with one at the end.
            sources = sorted(ext.sources, key=os.path.getsize, reverse=True)
            with ThreadPool(PROCESSORS) as pool:
                made = pool.map(lambda source: self._compile(ext, source), sources, chunksize=1)
            ext.depends += ext.sources
            ext.extra_objects = sorted(path for paths in made for path in paths)
            ext.sources = []
        super().build_extension(ext)

    def _compile(self, ext: Extension, source: str) -> list[str]:
        return self.compiler.compile(  # type: ignore[no-any-return]
            [source],
            output_dir=self.build_temp,
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            debug=self.debug,
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )


def extensions() -> list[Extension]:
    from Cython.Build import cythonize  # noqa: PLC0415 (only to compile)
    from mypyc.build import mypycify  # noqa: PLC0415

    modules = [
        Extension("iserblk.sockets._syscalls", ["iserblk/sockets/_syscalls.pyx"]),
        # A plain module, with C types beside it.
        Extension(
            "iserblk.disk.durability._copies",
            ["iserblk/disk/durability/copies.py"],
            depends=["iserblk/disk/durability/_copies.pxd"],
        ),
    ]
    if Path("/usr/include/isa-l/crc.h").exists():
        modules.append(Extension("iserblk._crc", ["iserblk/_crc.pyx"], libraries=["isal"]))
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
    made = cythonize(
        modules,
        compiler_directives={"language_level": "3", "annotation_typing": False},
        build_dir="build",
    )
    if os.environ.get("ISERBLK_PLAIN", "0") in ("", "0"):
        forms = runpy.run_path("iserblk/forms.py")
        sources = [str(Path(*module.split(".")).with_suffix(".py")) for module in forms["MODULES"]]
        made += mypycify(
            ["--config-file=pyproject.toml", *sources],
            opt_level=os.environ.get("ISERBLK_OPTIMIZE", "2"),
            multi_file=True,  # for several processors (Build)
            group_name=forms["LIBRARY"].removesuffix("__mypyc"),
        )
    return list(made)


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
    for folder, _, names in sorted(os.walk("share")):
        if names:
            found.append((folder, sorted(os.path.join(folder, name) for name in names)))
    return found


setup(
    ext_modules=[] if NO_MODULES & set(sys.argv) else extensions(),
    data_files=data_files(),
    options={"build_ext": {"parallel": PROCESSORS}},
    cmdclass={"build_ext": Build},
)
