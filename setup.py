"""Compiles what pays: ``setup.py build_ext --inplace``. Everything works without, more slowly."""

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    ext_modules=cythonize(
        [Extension("iserblk.rcap.iwarp._syscalls", ["iserblk/rcap/iwarp/_syscalls.pyx"])],
        compiler_directives={"language_level": "3"},
        build_dir="build",
    )
)
