"""Checks what scripts/release has built.

    scripts/release_check.py --tree DIR [--url URL] ARCHIVE.tar.gz | WHEEL.whl
    PREFIX/bin/python -P scripts/release_check.py --installed

``--tree``: what the archive or wheel was made from, with share/ in it. Prints a line for each thing
that is missing, or that should not be there; the exit status is 1 if there is any. ``--installed``
checks the iserblk of the environment whose Python runs this: it serves a file, copies data to it
and back, and asks for what is not there. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import email
import filecmp
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any

# What every release has, also if what makes it has failed without a word. Below share/.
MANUALS = (
    *("man/man1/iserblk.1", "man/man1/nbdkit-iserblk-plugin.1", "man/man5/iserblk.conf.5"),
    *("man/man7/iserblk-url.7", "man/man8/mount.iserblk.8", "man/man8/umount.fuse.iserblk.8"),
    *("bash-completion/completions/iserblk", "zsh/site-functions/_iserblk"),
    "fish/vendor_completions.d/iserblk.fish",
)
PACKAGES = ("iserblk", "fuse_mount", "nbd_plugin")
EXTRAS = {"fuse", "verbs", "nbdkit"}
PROGRAMS = {"iserblk", "mount.iserblk", "umount.fuse.iserblk"}
# Compiled without mypyc, and what the machine that builds has to have for it.
OTHERS = {
    "iserblk.sockets._syscalls": "",
    "iserblk._octets": "",
    "iserblk._files": "",
    "iserblk.disk.durability._copies": "",
    "iserblk._crc": "libisal-dev",
    "iserblk.rcap.iwarp._frames": "libisal-dev",
    "iserblk.rcap.verbs._gaps": "libibverbs-dev and librdmacm-dev",
}
# Of the libraries that a wheel looks for outside of it, those that manylinux does not promise.
RDMA = {"libibverbs.so.1", "librdmacm.so.1"}
_SYSTEM = re.compile(r"(libc|libm|libpthread|libdl|librt|libgcc_s|ld-linux[-a-z0-9_]*)\.so\.\d+")
_LIBISAL = re.compile(r"libisal-[0-9a-f]+\.so\.[0-9.]+")  # the one that auditwheel puts in


def files_of(tree: Path) -> list[str]:
    """The files of a tree, as paths relative to it."""
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())


def faults_of_archive(path: Path, tree: Path, url: str) -> Iterator[str]:
    """What is wrong with a source archive: it has the tree, and no more than setuptools adds."""
    with tarfile.open(path) as archive:
        names = {
            PurePosixPath(*PurePosixPath(member.name).parts[1:]).as_posix(): member
            for member in archive.getmembers()
            if member.isfile()
        }
        for name in files_of(tree):
            if name.split("/")[0].endswith(".egg-info"):
                continue
            if name not in names:
                yield f"missing: {name}"
            elif bool(names[name].mode & 0o100) != os.access(tree / name, os.X_OK):
                yield f"differs in whether it can be run: {name}"
        known = set(files_of(tree)) | {"PKG-INFO", "setup.cfg"}
        for name in names:
            if name not in known and not name.split("/")[0].endswith(".egg-info"):
                yield f"not of the tree: {name}"
        if "PKG-INFO" in names:
            text = archive.extractfile(names["PKG-INFO"])
            assert text is not None
            yield from _faults_of_metadata(email.message_from_bytes(text.read()), tree, url)
    yield from _faults_of_share({name.removeprefix("share/") for name in names})


def faults_of_wheel(path: Path, tree: Path, url: str) -> Iterator[str]:
    """What is wrong with a wheel: it has all modules, compiled ones beside them, and what belongs
    outside of Python's packages."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith("dist-info")}
        data = info.removesuffix("dist-info") + "data/data/share/"
        wanted = [
            name
            for name in files_of(tree)
            if name.split("/")[0] in PACKAGES and name.endswith((".py", ".pyi", "py.typed"))
        ]
        wanted += [
            data + name.removeprefix("share/")
            for name in files_of(tree)
            if name.startswith("share/")
        ]
        for source, place in (("scripts/systemd/", "systemd"), ("monitoring/", "monitoring")):
            found = [name.rpartition("/")[2] for name in files_of(tree) if name.startswith(source)]
            wanted += [f"{data}iserblk/{place}/{name}" for name in found]
        wanted += [f"{data}iserblk/install-units"]
        wanted += [
            f"{data}doc/iserblk/{name.removeprefix('docs/')}"
            for name in files_of(tree)
            if name.startswith("docs/") and name.endswith(".md")
        ]
        wanted += [
            f"{data}doc/iserblk/{name}" for name in files_of(tree) if name.startswith("examples/")
        ]
        yield from (f"missing: {name}" for name in wanted if name not in names)
        yield from _faults_of_share(
            {name.removeprefix(data) for name in names if name.startswith(data)}
        )
        yield from _faults_of_modules(names, tree)
        if not any(name.startswith(f"{info}/") and "LICENSE" in name for name in names):
            yield f"missing: the licence, in {info}"
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        yield from _faults_of_metadata(metadata, tree, url)
        entries = wheel.read(f"{info}/entry_points.txt").decode().split()
        yield from (f"missing: the program {name}" for name in PROGRAMS - set(entries))
        known = {*PACKAGES, "iserblk.libs", info, data.split("/")[0]}
        for name in sorted(names):
            top = name.split("/")[0]
            if (top not in known and not top.endswith(".so")) or name.endswith((".pyx", ".c")):
                yield f"not for a wheel: {name}"
        with tempfile.TemporaryDirectory() as folder:
            yield from _faults_of_libraries(wheel, Path(folder))


def _faults_of_share(names: set[str]) -> Iterator[str]:
    yield from (f"missing: share/{name}" for name in MANUALS if name not in names)


def _faults_of_modules(names: set[str], tree: Path) -> Iterator[str]:
    compiled = {name.split(".")[0].replace("/", ".") for name in names if name.endswith(".so")}
    forms = runpy.run_path(str(tree / "iserblk" / "forms.py"))
    for module in (forms["LIBRARY"], *forms["MODULES"]):
        if module not in compiled:
            yield f"not compiled: {module}"
    for module, headers in OTHERS.items():
        if module not in compiled:
            yield f"not compiled: {module}" + (f"; install {headers}" if headers else "")


def _faults_of_libraries(wheel: zipfile.ZipFile, folder: Path) -> Iterator[str]:
    """Libraries that the compiled modules need and that not every machine has."""
    for name in wheel.namelist():
        if ".so" not in name.rpartition("/")[2]:
            continue
        for library in needed(Path(wheel.extract(name, folder))):
            if library in RDMA and "/_gaps." in name:
                continue
            if not _SYSTEM.fullmatch(library) and not _LIBISAL.fullmatch(library):
                yield f"{name} needs {library}"


def needed(library: Path) -> list[str]:
    """The libraries that an ELF file names (NEEDED)."""
    done = subprocess.run(
        ["readelf", "--dynamic", "--wide", library], capture_output=True, text=True, check=True
    )
    return re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout)


def _faults_of_metadata(metadata: Message, tree: Path, url: str) -> Iterator[str]:
    text = (tree / "iserblk" / "__init__.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    for name, wanted in (("Name", "iserblk"), ("Version", version and version[1])):
        if metadata[name] != wanted:
            yield f"{name} is {metadata[name]}, and not {wanted}"
    classifiers = metadata.get_all("Classifier", [])
    if len(classifiers) == 0:
        yield "there are no classifiers"
    if metadata["License-Expression"] != "Apache-2.0":
        yield f"License-Expression is {metadata['License-Expression']}, and not Apache-2.0"
    if any(each.startswith("License ::") for each in classifiers):
        yield "a classifier names the licence, beside License-Expression"
    if missing := EXTRAS - set(metadata.get_all("Provides-Extra", [])):
        yield f"missing: the extras {', '.join(sorted(missing))}"
    for requirement in metadata.get_all("Requires-Dist", []):
        if re.match(r"pyfuse3|pyverbs", requirement) and "extra ==" not in requirement:
            yield f"everyone gets what has to be compiled: {requirement}"
    urls = [line.rpartition(", ")[2] for line in metadata.get_all("Project-URL", [])]
    if url and url not in urls:
        yield f"the metadata does not have {url}"


# --- what is installed ----------------------------------------------------------------------------


def check_installed(prefix: Path) -> list[str]:
    """What does not work with the programs in ``prefix``/bin."""
    faults: list[str] = []
    program = str(prefix / "bin" / "iserblk")
    # Nothing of the caller's may help: no module beside the current directory, no variable.
    clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8"}

    def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, cwd="/", env={**clean, **changes},
            timeout=300,
        )  # fmt: skip

    def expect(good: bool, said: str) -> None:
        if not good:
            faults.append(said)

    done = run(program, "--version")
    expect(done.returncode == 0, f"iserblk --version: {done.stderr}")
    form = run(sys.executable, "-c", "import iserblk.forms as f; print(f.why_plain)")
    expect(form.stdout == "\n", f"the data path is not compiled: {form.stdout}{form.stderr}")
    loaded = [module for module in OTHERS if module != "iserblk.rcap.verbs._gaps"]
    done = run(sys.executable, "-c", "".join(f"import {each}\n" for each in loaded))
    expect(done.returncode == 0, f"a compiled module cannot be loaded: {done.stderr}")

    said = run(program, "doctor").stdout
    expect("data path" in said, f"iserblk doctor: {said}")
    expect("scripts/" not in said, f"iserblk doctor speaks of scripts of a checkout: {said}")
    # Without the extra [fuse] there is no mount, and the remedy is that of a wheel.
    done = run(str(prefix / "bin" / "mount.iserblk"), "iser://h/iqn.2026-11.example:d", "/")
    told = done.stderr.strip().splitlines()
    expect(
        len(told) == 1 and "'iserblk[fuse]'" in told[0], f"mount.iserblk without pyfuse3: {told}"
    )

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        units = run(str(prefix / "share/iserblk/install-units"), "--root", f"{folder}/root")
        expect(units.returncode == 0, f"install-units: {units.stderr}")
        made = [path.read_text() for path in (folder / "root").rglob("*") if path.is_file()]
        expect(
            len(made) > 2 and any(f"={program} attach" in text for text in made)
            and any(f"exec {prefix}/bin/mount.iserblk " in text for text in made),
            "install-units does not name the programs of this environment",
        )  # fmt: skip
        (folder / "source").write_bytes(os.urandom(3 << 20) + bytes(5 << 20))
        with serving(program, folder, clean) as url:
            for words in (
                (program, "copy", f"{folder}/source", f"{url}/0", "--verify"),
                (program, "copy", f"{url}/0", f"{folder}/back"),
            ):
                done = run(*words)
                expect(done.returncode == 0, f"{' '.join(words)}: {done.stderr}")
            same = (folder / "back").exists() and filecmp.cmp(
                folder / "source", folder / "back", shallow=False
            )
            expect(same, "what was copied to the LUN and back is not the same")
            faults += _nbdkit(prefix, f"{url}/0", run)
    return faults


def _nbdkit(prefix: Path, url: str, run: Any) -> list[str]:
    """Where nbdkit and its plugin for Python are here: it serves the LUN, or tells that its Python
    is another."""
    plugins = run("nbdkit", "--dump-plugin", "python") if _in_path("nbdkit") else None
    match = re.search(r"^python_version=(\d+\.\d+)", plugins.stdout, re.M) if plugins else None
    if match is None:
        print("not looked at: nbdkit, or its plugin for Python, is not here", file=sys.stderr)
        return []
    program = str(prefix / "bin" / "iserblk")
    ours = "{}.{}".format(*sys.version_info[:2])
    (plugin,) = (prefix / "lib").glob("python3.*/site-packages/nbd_plugin/iserblk.py")
    done = run("nbdkit", "-U", "-", "python", str(plugin), f"uri={url}", "--run", "true")
    if match[1] == ours:
        return (
            [] if done.returncode == 0 else [f"nbdkit with the plugin of {prefix}: {done.stderr}"]
        )
    words = f"nbdkit has Python {match[1]} in it, and iserblk is installed for {ours}"
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        asked = run(program, "nbd", "--nbdkit", url, "--socket", f"{folder}/s")
    for failed in (done, asked):
        if failed.returncode == 0 or words not in failed.stderr:
            faults.append(f"not told that nbdkit has another Python: {failed.stderr}")
    return faults


def _in_path(name: str) -> bool:
    return any(os.access(f"{place}/{name}", os.X_OK) for place in ("/usr/sbin", "/usr/bin"))


@contextmanager
def serving(program: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """A target of that program with a LUN of 8 MiB; yields its URL, without the LUN."""
    words = [program, "target", "--iqn", "iqn.2026-11.example:disk", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*words, "--lun", f"{folder}/lun:size=8M"],
        stdout=subprocess.PIPE, text=True, cwd="/", env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith("ready "):
                raise SystemExit(f"release_check: iserblk target does not start: {line}")
            yield line.split()[1]
        finally:
            process.terminate()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--url", default="")
    parser.add_argument("--installed", action="store_true")
    parser.add_argument("built", type=Path, nargs="?")
    given = parser.parse_args(arguments)
    faults: Iterable[str]
    if given.installed:
        name, faults = sys.prefix, check_installed(Path(sys.prefix))
    elif given.tree is None or given.built is None:
        parser.error("give --tree DIR and what was built, or --installed")
    else:
        faults_of = faults_of_wheel if given.built.suffix == ".whl" else faults_of_archive
        name, faults = given.built.name, faults_of(given.built, given.tree, given.url)
    found = list(faults)
    for fault in found:
        print(f"release_check: {name}: {fault.strip()}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
