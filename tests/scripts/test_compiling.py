"""setup.py: what it compiles again after an edit, and what it says meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import deb_environment
import pytest
import release_check

from iserblk.forms import OF_CYTHON
from tests.support.nbdkit import need
from tests.support.target import ROOT

MODULE = """
#include <Python.h>
#include "numbers.h"
extern int other(void);
static PyObject *number(PyObject *self, PyObject *none) { return PyLong_FromLong(FIRST + other()); }
static PyMethodDef methods[] = {{"number", number, METH_NOARGS, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "made", NULL, -1, methods};
PyMODINIT_FUNC PyInit_made(void) { return PyModule_Create(&module); }
"""
# In place of mypyc, which takes ten seconds.
MYPYCIFY = """
from setuptools import Extension
def mypycify(words, opt_level, **others):
    return [Extension("made", ["made.c", "other.c"], include_dirs=["."], depends=["numbers.h"],
                      extra_compile_args=["-O" + opt_level])]
"""


class Tree:
    """Two C files with a header, and the setup.py of this checkout."""

    def __init__(self, folder: Path) -> None:
        need("cc")
        self.folder = folder
        shutil.copy(ROOT / "setup.py", folder)
        for name in ("monitoring", "scripts/systemd", "iserblk", "fake/mypyc", "fake/Cython"):
            (folder / name).mkdir(parents=True)
        self.write("iserblk/forms.py", "MODULES, LIBRARY = ('a.b', 'c'), 'made__mypyc'\n")
        self.write("fake/mypyc/__init__.py", "")
        self.write("fake/mypyc/build.py", MYPYCIFY)
        self.write("fake/Cython/__init__.py", "")
        self.write("fake/Cython/Build.py", "def cythonize(modules, **others): return []\n")
        self.write("made.c", MODULE)
        self.write("other.c", "int other(void) { return 2; }\n")
        self.write("numbers.h", "#define FIRST 40\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def build(self, *words: str, **changes: str) -> list[str]:
        """Compiles. Returns what the module says, then the objects that were made for it."""
        before = self._objects()
        self.errors = subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", *words],
            cwd=self.folder, check=True, env={**self.environment, **changes},
            stderr=subprocess.PIPE, text=True,
        ).stderr  # fmt: skip
        said = subprocess.run(
            [sys.executable, "-c", "import made; print(made.number())"],
            cwd=self.folder, check=True, capture_output=True, text=True,
        )  # fmt: skip
        after = self._objects()
        made = [name for name, time in after.items() if time != before.get(name)]
        return [said.stdout.strip(), *sorted(made)]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "ISERBLK" not in name}
        return {**kept, "PYTHONPATH": str(self.folder / "fake")}

    def _objects(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.folder.rglob("*.o")}

    def said(self, descriptor: int) -> None:
        """Compiles, and has the progress written to that descriptor."""
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--force"],
            cwd=self.folder, check=True, pass_fds=[descriptor],
            env={**self.environment, "ISERBLK_PROGRESS": str(descriptor)},
        )  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize("words", [(), ("--force",)])
def test_what_has_changed_is_compiled_again(tree: Tree, words: tuple[str, ...]) -> None:
    """By content: the generated files have new times always. And all, where a header, an option or
    the compiler's flags are others."""
    assert tree.build(*words) == ["42", "made.o", "other.o"]
    tree.write("made.c", MODULE)
    assert tree.build(*words) == ["42"]
    tree.write("other.c", "int other(void) { return 3; }\n")
    assert tree.build(*words) == ["43", "other.o"]
    tree.write("numbers.h", "#define FIRST 50\n")
    assert tree.build(*words) == ["53", "made.o", "other.o"]
    assert tree.build(*words, ISERBLK_OPTIMIZE="0") == ["53", "made.o", "other.o"]
    tree.write("other.c", "int other(void) { return OTHER; }\n")
    for number in (4, 5):  # by the compiler's flags alone
        flags = f"-DOTHER={number}"
        assert tree.build(*words, CFLAGS=flags) == [f"5{number}", "made.o", "other.o"]
    tree.write("other.c", "int other(void) { return 3; }\n")
    assert tree.build(*words, ISERBLK_OPTIMIZE="0", CFLAGS="-g0") == ["53", "made.o", "other.o"]


def test_a_failed_compilation_is_tried_again(tree: Tree) -> None:
    tree.build()
    tree.write("other.c", "int other(void) { return }\n")
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            tree.build()
    tree.write("other.c", "int other(void) { return 4; }\n")
    assert tree.build() == ["44", "other.o"]


def test_pip_builds_a_wheel(tree: Tree) -> None:
    """It runs setup.py by exec: no function of that can be looked up in a module."""
    tree.write("scripts/install-units", "")
    words = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run(
        [sys.executable, "-c", words],
        cwd=tree.folder, env=tree.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tree.folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert [name for name in file.namelist() if name.startswith("made.")]


@pytest.mark.parametrize("words", ["--help", "--name", "--help build_ext", "clean", "egg_info"])
def test_what_compiles_nothing_waits_for_no_compiler(tree: Tree, words: str) -> None:
    tree.write("fake/mypyc/build.py", "raise SystemExit('mypyc was called')\n")
    tree.write("fake/Cython/Build.py", "raise SystemExit('Cython was called')\n")
    for command, status in ((words, 0), ("build_ext", 1)):
        ended = subprocess.run(
            [sys.executable, "setup.py", *command.split()],
            cwd=tree.folder, env=tree.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == status, ended.stderr
        assert ("was called" in ended.stderr) == (status == 1)


def test_an_error_of_a_type_is_shown_and_nothing_is_compiled(tree: Tree) -> None:
    """mypyc prints it, and ends its process."""
    tree.write(
        "fake/mypyc/build.py",
        "def mypycify(*words, **others):\n    print('a.py:1: wrong')\n    raise SystemExit(1)\n",
    )
    ended = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=tree.folder, env=tree.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "a.py:1: wrong\n", "")
    assert not list(tree.folder.rglob("*.o"))


@pytest.mark.parametrize("headers", ["known", "beside"])
def test_what_many_files_include_is_read_once(tree: Tree, headers: str) -> None:
    """Where the compiler finds it. Elsewhere, too, and after a change, the files are compiled."""
    many = tree.folder / "many"
    many.mkdir()
    names = [f"many/part{number}.c" for number in range(12)]
    header = "many.h" if headers == "known" else "many/many.h"
    for number, name in enumerate(names):
        tree.write(name, f'#include "many.h"\nint part{number}(void) {{ return PART; }}\n')
    tree.write(header, "#pragma once\n#warning this header is read\n#define PART 2\n")
    tree.write("other.c", "int part11(void);\nint other(void) { return part11(); }\n")
    text = MYPYCIFY.replace('"other.c"', f'"other.c", *{names}')
    tree.write("fake/mypyc/build.py", text.replace('"numbers.h"', f'"numbers.h", "{header}"'))
    objects = ["made.o", "other.o", *(f"{name[5:-2]}.o" for name in names)]
    assert tree.build() == ["42", *sorted(objects)]
    assert ("this header is read" in tree.errors) == (headers == "beside")
    assert not list(tree.folder.rglob("*.gch"))
    tree.write(header, "#pragma once\n#define PART 3\n")
    assert tree.build() == ["43", *sorted(objects)]


# Notes what comes into its place, and ends the process before the second.
STOPS = """
import os
from pathlib import Path
replace = os.replace
def stopping(part, whole):
    with open("placed", "a") as file:
        print(os.path.basename(whole).partition(".")[0], file=file)
    if Path("placed").read_text().count("\\n") == 2:
        os._exit(9)
    replace(part, whole)
os.replace = stopping
"""


def test_what_is_interrupted_is_not_taken_for_whole(tree: Tree) -> None:
    """The library comes last, and each file in one step."""
    library = 'Extension("made__mypyc", ["library.c"]), Extension("made",'
    tree.write("fake/mypyc/build.py", MYPYCIFY.replace('Extension("made",', library))
    tree.write(
        "library.c",
        "#include <Python.h>\nPyMODINIT_FUNC PyInit_made__mypyc(void)"
        ' { return PyModule_New("made__mypyc"); }\n',
    )
    tree.write("fake/sitecustomize.py", STOPS)
    with pytest.raises(subprocess.CalledProcessError) as ended:
        tree.build()
    assert ended.value.returncode == 9
    assert (tree.folder / "placed").read_text().split() == ["made", "made__mypyc"]
    assert [path.name.partition(".")[0] for path in tree.folder.glob("*.so")] == ["made"]
    tree.write("fake/sitecustomize.py", "")
    assert tree.build() == ["42"]
    assert len(list(tree.folder.glob("*.so"))) == 2


def test_it_says_how_far_it_is(tree: Tree, tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file:
        tree.said(file.fileno())
    assert (tmp_path / "said").read_text().splitlines() == [
        "setup: reading the types of 2 modules",
        "setup: compiled 1 of 2 C files",
        "setup: compiled 2 of 2 C files",
    ]


def test_it_says_so_in_one_line_of_a_terminal(tree: Tree) -> None:
    ours, theirs = os.openpty()
    tree.said(theirs)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert said.count("\n") == 2  # after the types, and at the end
    assert said.endswith("\r\x1b[Ksetup: compiled 2 of 2 C files\r\n")


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("scripts/release_check.py", set(release_check.OTHERS)),
        ("scripts/deb_environment.py", {f"iserblk.{each}" for each in deb_environment.COMPILED}),
        (
            "setup.py",
            set(re.findall(r'Extension\(\s*"(iserblk\.[^"]+)"', (ROOT / "setup.py").read_text())),
        ),
    ],
)
def test_what_cython_compiles_is_in_each_list(place: str, names: set[str]) -> None:
    missing, gone = set(OF_CYTHON) - names, names - set(OF_CYTHON)
    assert not missing and not gone, f"{place} lacks {missing}, and has {gone} beside OF_CYTHON"
