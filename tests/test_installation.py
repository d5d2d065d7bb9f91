"""What to do where something is missing, for each way to install iserblk."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk import installation
from iserblk.installation import CHECKOUT, DEBIAN, HERE, WHEEL, Installation

PACKAGES = "lib/python3.12/site-packages"


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Disk:
    """A file system made of files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.of_python = root / "library"

    def at(self, top: str) -> Installation:
        return Installation(str(self.root / top), str(self.root), str(self.of_python))

    def checkout(self) -> Installation:
        put(self.root / "clone/scripts/setup")
        return self.at("clone")

    def debian(self, top: str = "usr/lib/python3/dist-packages") -> Installation:
        put(self.root / "var/lib/dpkg/info/iserblk.list")
        return self.at(top)

    def environment(self, prefix: str, *files: str) -> Installation:
        for name in ("pyvenv.cfg", *files):
            put(self.root / prefix / name)
        return self.at(f"{prefix}/{PACKAGES}")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_these_tests_run_in_a_checkout() -> None:
    assert HERE.kind == CHECKOUT
    assert HERE.top == str(Path(__file__).resolve().parent.parent)


def test_a_checkout_is_completed_by_its_script(disk: Disk) -> None:
    here = disk.checkout()
    assert here.programs("fuse3") == "run scripts/setup, or install fuse3"
    assert here.python_package("trio") == "run scripts/setup"
    assert here.compiled("libibverbs-dev") == "run scripts/setup"
    assert here.units() == "run scripts/install-units"


def test_of_debians_package_apt_makes_whole_what_is_missing(disk: Disk) -> None:
    here = disk.debian()
    assert here.kind == DEBIAN
    assert here.programs("fuse3") == "install fuse3"
    assert here.python_package("prometheus_client") == "install python3-prometheus-client"
    assert here.compiled() == here.units() == "run apt-get install --reinstall iserblk"
    bundled = disk.debian(f"usr/lib/iserblk/{PACKAGES}")
    assert bundled.python_package("trio", requirement="x") == here.compiled()


def test_what_csi_alone_needs(disk: Disk) -> None:
    """scripts/setup does not install it, and Debian's packages have names of their own."""
    here = disk.checkout()
    assert here.csi() == f"run {here.top}/.venv/bin/python -m pip install grpcio protobuf"
    assert disk.debian().csi() == "install python3-grpcio and python3-protobuf"
    bundled = disk.debian(f"usr/lib/iserblk/{PACKAGES}")
    assert bundled.csi() == disk.debian().csi()
    wheel = disk.environment("opt/env", "bin/pip")
    assert wheel.csi() == f"run {wheel.pip()} 'iserblk[csi]'"


def test_below_usr_lib_without_the_package_is_a_wheel(disk: Disk) -> None:
    assert disk.at("usr/lib/python3/dist-packages").kind == WHEEL
    disk.debian()
    assert disk.at(f"usr/local/{PACKAGES}").kind == WHEEL


@pytest.mark.parametrize(
    ("files", "pip"),
    [
        (["bin/pip"], "{prefix}/bin/python -m pip install"),
        ([], "uv pip install --python {prefix}"),
        (["uv-receipt.toml"], "uv pip install --python {prefix}"),
        (["bin/pip", "pipx_metadata.json"], "pipx runpip my-env install"),
        (["pipx_metadata.json"], "pipx runpip my-env install"),
    ],
)
def test_a_wheel_is_completed_by_what_installed_it(files: list[str], pip: str, disk: Disk) -> None:
    here = disk.environment("opt/my-env", *files)
    pip = pip.format(prefix=disk.root / "opt/my-env")
    assert here.kind == WHEEL
    assert here.python_package("trio") == f"run {pip} trio"
    needed = here.python_package("pyfuse3", requirement="iserblk[fuse]", headers="gcc and more")
    assert needed == f"install gcc and more, then run {pip} 'iserblk[fuse]'"
    assert here.compiled("x-dev").startswith(f"install a C compiler, x-dev and Python's headers, "
                                             f"then run {pip} --force-reinstall")  # fmt: skip


def test_a_wheel_in_no_environment(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(disk.root / "home"))
    user, system = disk.at(f"home/.local/{PACKAGES}"), disk.at(f"usr/local/{PACKAGES}")
    assert user.pip() == "python3 -m pip install --user"
    assert system.pip() == "python3 -m pip install"
    put(disk.of_python / "EXTERNALLY-MANAGED")
    assert user.pip() == "python3 -m pip install --user --break-system-packages"
    assert system.pip() == "python3 -m pip install --break-system-packages"


def test_what_only_the_distribution_has(disk: Disk) -> None:
    """An environment has to look there; and it does so only for the distribution's Python."""
    assert disk.checkout().of_distribution("python3-x") == "run scripts/setup"
    here = disk.environment("opt/env", "bin/pip")
    assert "python3-x, and" in here.of_distribution("python3-x")
    assert "--system-site-packages" in here.of_distribution("python3-x")
    put(disk.root / "opt/env/pyvenv.cfg", "home = /usr\ninclude-system-site-packages = true\n")
    for each in (here, disk.at(f"usr/local/{PACKAGES}"), disk.debian()):
        assert each.of_distribution("python3-x") == "install python3-x"


def test_nbdkits_python_is_another(disk: Disk) -> None:
    wheel = disk.environment("opt/env", "bin/pip")
    assert wheel.pythons() == ["3.12"]
    said = wheel.for_nbdkit("crc32c._crc32c", (3, 11))
    assert said.startswith("nbdkit has Python 3.11 in it, and iserblk is installed for 3.12: ")
    assert "install it for Python 3.11" in said
    assert wheel.for_nbdkit("crc32c._crc32c", (3, 12)) == wheel.python_package("crc32c")

    clone = disk.checkout()
    assert clone.for_nbdkit("trio", (3, 11)) == "run scripts/setup"  # never set up
    (disk.root / "clone/.venv" / PACKAGES).mkdir(parents=True)
    assert clone.for_nbdkit("trio", (3, 11)).endswith(
        "for 3.12: remove .venv and run scripts/setup"
    )
    assert clone.for_nbdkit("trio", (3, 12)) == "run scripts/setup"

    assert disk.debian().for_nbdkit("trio", (3, 11)) == "install python3-trio"


def test_a_wheel_never_speaks_of_scripts(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "HERE", disk.environment("opt/env", "bin/pip"))
    for said in (installation.no_pyfuse3(), installation.no_gaps()):
        assert "scripts/" not in said and f"{disk.root}/opt/env/bin/python -m pip" in said
    assert "scripts/" not in installation.no_pyverbs()
    assert installation.HERE.units() == f"run {disk.root}/opt/env/share/iserblk/install-units"


def test_only_one_module_tells_to_run_the_script() -> None:
    """All others ask it: in an installation of another kind there is no such script."""
    root = Path(__file__).resolve().parent.parent
    telling = {
        path.relative_to(root).as_posix()
        for place in ("iserblk", "fuse_mount", "nbd_plugin")
        for path in (root / place).rglob("*.py*")
        if path.suffix in (".py", ".pyx") and "run scripts/" in path.read_text()
    }
    assert telling == {"iserblk/installation.py"}
