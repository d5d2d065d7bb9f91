"""How this iserblk was installed, and what to do, in that case, where something is missing.

There are three ways: a checkout, which ``scripts/setup`` completes; Debian's package; and a wheel,
by pip, pipx or uv, into a virtual environment, the user's packages or the system's. The place of
the package ``iserblk`` tells them apart, and not the interpreter: the plugin of nbdkit asks, too,
and runs in nbdkit's. This module needs the standard library only.
"""

from __future__ import annotations

import os
import shlex

CHECKOUT, DEBIAN, WHEEL = "checkout", "debian", "wheel"

_SETUP = "run scripts/setup"
_AGAIN = "run apt-get install --reinstall iserblk"


class Installation:
    """``top``: the directory that has the package ``iserblk`` in it. ``root``: of the file system;
    ``library``: of Python's standard library. Both differ in tests only.

    Each method returns what to do, as words that follow a colon or a semicolon."""

    def __init__(self, top: str, root: str = "/", library: str = os.path.dirname(os.__file__)):
        self.top = top
        self._library = library
        self._usr_lib = os.path.join(root, "usr", "lib", "")
        if os.path.isfile(os.path.join(top, "scripts", "setup")):
            self.kind = CHECKOUT
        elif top.startswith(self._usr_lib) and os.path.exists(
            os.path.join(root, "var", "lib", "dpkg", "info", "iserblk.list")
        ):
            self.kind = DEBIAN
        else:
            self.kind = WHEEL

    def programs(self, packages: str) -> str:
        """Programs and libraries of the distribution are missing. ``packages``: its names of
        them, in words."""
        if self.kind == CHECKOUT:
            return f"{_SETUP}, or install {packages}"
        return f"install {packages}"

    def python_package(self, name: str, *, requirement: str = "", headers: str = "") -> str:
        """A package of Python is missing. ``name``: of the module; ``requirement``: what to give
        to pip, if it is not ``name``; ``headers``: what the distribution has to have so that pip
        can compile it, in words."""
        if self.kind == CHECKOUT:
            return _SETUP
        if self.kind == DEBIAN:
            # Elsewhere in /usr/lib is an environment that the package has brought along.
            if os.path.basename(self.top) == "dist-packages":
                return f"install python3-{name.replace('_', '-')}"
            return _AGAIN
        first = f"install {headers}, then " if headers else ""
        return f"{first}run {self.pip()} {shlex.quote(requirement or name)}"

    def csi(self) -> str:
        """grpcio or protobuf is missing, which `iserblk csi` alone needs."""
        if self.kind == CHECKOUT:  # scripts/setup leaves them out
            python = os.path.join(self.top, ".venv", "bin", "python")
            return f"run {shlex.quote(python)} -m pip install grpcio protobuf"
        if self.kind == DEBIAN:  # its environment sees the distribution's packages
            return "install python3-grpcio and python3-protobuf"
        return self.python_package("grpcio", requirement="iserblk[csi]")

    def of_distribution(self, package: str) -> str:
        """A package of Python is missing that only the distribution has, as ``package``."""
        if self.kind == CHECKOUT:
            return _SETUP
        prefix = self._environment()
        if self.kind == DEBIAN or prefix is None or _sees_the_systems(prefix):
            return f"install {package}"
        return (
            f"install {package}, and iserblk for the distribution's Python in an environment made"
            " with --system-site-packages"
        )

    def compiled(self, headers: str = "") -> str:
        """A compiled module of iserblk is missing, or is for another Python. ``headers``: what the
        distribution has to have so that it can be compiled, in words."""
        if self.kind == CHECKOUT:
            return _SETUP
        if self.kind == DEBIAN:
            return _AGAIN
        needs = f"a C compiler, {headers}" if headers else "a C compiler"
        return (
            f"install {needs} and Python's headers, then run {self.pip()} --force-reinstall"
            " --no-deps with the source archive of iserblk"
        )

    def units(self) -> str:
        """systemd's units are missing."""
        if self.kind == CHECKOUT:
            return "run scripts/install-units"
        if self.kind == DEBIAN:
            return _AGAIN
        # PREFIX/lib/python3.11/site-packages
        prefix = os.path.dirname(os.path.dirname(os.path.dirname(self.top)))
        return f"run {shlex.quote(os.path.join(prefix, 'share', 'iserblk', 'install-units'))}"

    def pip(self) -> str:
        """The command that installs Python packages beside a wheel's."""
        prefix = self._environment()
        if prefix is None:
            user = os.path.expanduser(os.path.join("~", ".local", ""))
            words = "python3 -m pip install"
            words += " --user" if self.top.startswith(user) else ""
            if os.path.exists(os.path.join(self._library, "EXTERNALLY-MANAGED")):
                words += " --break-system-packages"
            return words
        if os.path.exists(os.path.join(prefix, "pipx_metadata.json")):
            return f"pipx runpip {shlex.quote(os.path.basename(prefix))} install"
        if not os.path.exists(os.path.join(prefix, "bin", "pip")):  # as uv makes them
            return f"uv pip install --python {shlex.quote(prefix)}"
        return f"{shlex.quote(os.path.join(prefix, 'bin', 'python'))} -m pip install"

    def for_nbdkit(self, name: str, python: tuple[int, int]) -> str:
        """The Python in nbdkit, whose version is ``python``, does not find the module ``name``."""
        there = "{}.{}".format(*python)
        ours = self.pythons()
        if not ours or there in ours:
            return self.python_package(name.partition(".")[0])
        text = f"nbdkit has Python {there} in it, and iserblk is installed for {' and '.join(ours)}"
        if self.kind == CHECKOUT:
            return f"{text}: remove .venv and {_SETUP}"
        if self.kind == DEBIAN:
            return f"{text}: {_AGAIN}"
        return f"{text}: install it for Python {there}, too, and use that one, or do without nbdkit"

    def pythons(self) -> list[str]:
        """The versions of Python that iserblk was installed for ("3.11"), as far as directories
        tell them; those of Debian's package do not, because all versions share one."""
        folders = [self.top]
        if self.kind == CHECKOUT:
            library = os.path.join(self.top, ".venv", "lib")
            folders = [os.path.join(library, name) for name in _names(library)]
        parts = {part for folder in folders for part in folder.split(os.sep)}
        versions = {part.removeprefix("python") for part in parts if part.startswith("python3.")}
        return sorted(versions)

    def _environment(self) -> str | None:
        """The virtual environment that the package is in; None: in none."""
        folder = self.top
        while folder != os.path.dirname(folder):
            if os.path.isfile(os.path.join(folder, "pyvenv.cfg")):
                return folder
            folder = os.path.dirname(folder)
        return None


def _sees_the_systems(prefix: str) -> bool:
    """Whether a virtual environment has the distribution's packages in it, too."""
    with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8", errors="replace") as file:
        pairs = [line.partition("=") for line in file]
    return any(
        name.strip() == "include-system-site-packages" and value.strip().lower() == "true"
        for name, _, value in pairs
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


HERE = Installation(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def no_pyfuse3() -> str:
    """What to do where pyfuse3 is missing."""
    return HERE.python_package(
        "pyfuse3",
        requirement="iserblk[fuse]",
        headers="gcc, pkg-config, libfuse3-dev and python3-dev",
    )


def no_pyverbs() -> str:
    """What to do where pyverbs is missing."""
    return HERE.of_distribution("python3-pyverbs")


def no_gaps() -> str:
    """What to do where ``iserblk.rcap.verbs._gaps`` is missing, or does not fit pyverbs."""
    return HERE.compiled("libibverbs-dev and librdmacm-dev")
