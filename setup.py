"""Compiles what pays: ``setup.py build_ext --inplace``. Everything works without: more slowly, and
over RDMA devices without memory windows. With ISERBLK_PLAIN=1 the modules of ``iserblk.forms``
are left out. ISERBLK_OPTIMIZE: the level of gcc's optimisation for these modules; the default is
2."""

import os
import runpy
from pathlib import Path

from Cython.Build import cythonize
from mypyc.build import mypycify
from setuptools import Extension, setup

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
    (Path("/usr/include") / header).exists() for header in ("infiniband/verbs.h", "rdma/rdma_cma.h")
):
    modules.append(
        Extension(
            "iserblk.rcap.verbs._gaps",
            ["iserblk/rcap/verbs/_gaps.pyx"],
            libraries=["ibverbs", "rdmacm"],
        )
    )
extensions = cythonize(
    modules,
    compiler_directives={"language_level": "3", "annotation_typing": False},
    build_dir="build",
)
if os.environ.get("ISERBLK_PLAIN", "0") in ("", "0"):
    forms = runpy.run_path("iserblk/forms.py")
    sources = [str(Path(*module.split(".")).with_suffix(".py")) for module in forms["MODULES"]]
    extensions += mypycify(
        ["--config-file=pyproject.toml", *sources],
        opt_level=os.environ.get("ISERBLK_OPTIMIZE", "2"),
        multi_file=True,  # for several processors
        group_name=forms["LIBRARY"].removesuffix("__mypyc"),
    )

setup(ext_modules=extensions)
