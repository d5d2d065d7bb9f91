"""Runs tests against a copy of the tree that has one mutation."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutationslib.table import Mutation

PATIENCE_S = 600.0  # for the tests of one mutation; what takes longer hangs, which is noticed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the tests ended. ``killer``: the test that noticed the mutation; "": none did.
    ``problem``: why that says nothing; "" if it does."""

    killer: str
    seconds: float
    problem: str = ""


class Copy:
    """A copy of the tree ``top``, without what git ignores, which ends with ``close``."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self.place = Path(tempfile.mkdtemp(prefix="iserblk-mutations-"))
        self.place.chmod(0o755)  # tests run commands of the copy as other users, too
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=top,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            source, target = top / name, self.place / name
            if source.is_file() or source.is_symlink():  # else it was removed, and git has it still
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        (self.place / ".venv").symlink_to(top / ".venv")

    def close(self) -> None:
        shutil.rmtree(self.place)

    def check(self) -> str:
        """Why tests here would not run the code of the copy; "": they do."""
        probe = "import iserblk; print(iserblk.__file__)"
        done = self._run(["-c", probe], 60.0)
        if done is None or not done[1].strip().startswith(str(self.place)):
            return f"the tests would run {done[1].strip() if done else 'nothing'}"
        return ""

    def try_mutation(self, mutation: Mutation) -> Outcome:
        """Run the tests of ``mutation`` with it, and the one that notices it without. Raises
        BadTable."""
        path = self.place / mutation.file
        text = path.read_text(encoding="utf-8")
        changed = mutation.changed(text)
        began = time.monotonic()
        _write(path, changed)
        try:
            status, failed, output = self._pytest(mutation.tests)
        finally:
            _write(path, text)
        seconds = time.monotonic() - began
        if status == 0:
            return Outcome("", seconds)
        if status is None:
            again = self._pytest(mutation.tests)
            problem = "" if again[0] == 0 else "its tests do not end without it, either"
            return Outcome(f"{mutation.tests[0]} (does not end)", seconds, problem)
        if not failed:
            return Outcome("", seconds, f"pytest ended with {status}: {_last_line(output)}")
        again = self._pytest([failed])
        if again[0] != 0:
            return Outcome(failed, seconds, f"{failed} fails without it, too")
        return Outcome(failed, seconds)

    def _pytest(self, tests: Sequence[str]) -> tuple[int | None, str, str]:
        """The exit status (None: it did not end), the test that failed first, and the output."""
        failures = self.place / ".failures"
        failures.unlink(missing_ok=True)
        words = ["-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
        done = self._run([*words, f"--failures={failures}", *tests], PATIENCE_S)
        if done is None:
            return None, "", ""
        lines = failures.read_text().splitlines() if failures.exists() else []
        return done[0], _test_of(lines[0]) if lines else "", done[1]

    def _run(self, words: Sequence[str], patience: float) -> tuple[int, str] | None:
        """Python with ``words``: its exit status and output. None: it was killed."""
        environment = {
            **os.environ,
            "ISERBLK_PLAIN": "1",
            "PYTHONPATH": str(self.place),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with subprocess.Popen(
            [str(self._top / ".venv/bin/python"), *words],
            cwd=self.place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None
            return process.returncode, output


def _test_of(line: str) -> str:
    """The node id at the head of a line of --failures; its parameters may have colons, too."""
    parts = line.split(": ")
    for count in range(1, len(parts)):
        test = ": ".join(parts[:count])
        if "[" not in test or test.endswith("]"):
            return test
    return line


def _write(path: Path, text: str) -> None:
    """Write a module. Its bytecode goes: it would count as that of the new text, if that has the
    same length and is of the same second."""
    path.write_text(text, encoding="utf-8")
    for each in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        each.unlink(missing_ok=True)


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
