"""Compiles what pays: ``setup.py build_ext --inplace``. Everything works without: more slowly, and
over RDMA devices without memory windows."""

from pathlib import Path

from Cython.Build import cythonize
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

setup(
    ext_modules=cythonize(
        modules,
        compiler_directives={"language_level": "3", "annotation_typing": False},
        build_dir="build",
    )
)
