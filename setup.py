"""Compiles what pays: ``setup.py build_ext --inplace``. Everything works without: more slowly, and
over RDMA devices without memory windows. With ISERBLK_PLAIN=1 the modules of ``iserblk.forms``
are left out. ISERBLK_OPTIMIZE: the level of gcc's optimisation for these modules; the default is
2.

Also names the files that a wheel installs outside of Python's packages, below share/: what
scripts/install-units needs, and the manual pages and completions, if there is a directory share/
with them (``scripts/manpages --output .``)."""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup

NO_MODULES = {"sdist", "egg_info", "dist_info"}  # commands that look at no compiled module


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
            multi_file=True,  # for several processors
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
    for folder, _, names in sorted(os.walk("share")):
        if names:
            found.append((folder, sorted(os.path.join(folder, name) for name in names)))
    return found


setup(
    ext_modules=[] if NO_MODULES & set(sys.argv) else extensions(),
    data_files=data_files(),
    options={"build_ext": {"parallel": len(os.sched_getaffinity(0))}},
)
