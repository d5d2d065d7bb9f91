"""scripts/floors.py: the lowest versions that may be installed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from floors import PYPROJECT, floors, main


def project(*dependencies: str, build: tuple[str, ...] = (), **extras: list[str]) -> dict[str, Any]:
    return {
        "project": {"dependencies": list(dependencies), "optional-dependencies": extras},
        "build-system": {"requires": list(build)},
    }


def test_every_requirement_of_users_has_a_floor() -> None:
    """Also those that only an extra or the build needs."""
    found = floors(tomllib.loads(PYPROJECT.read_text("utf-8")))
    assert {"trio", "click", "pyfuse3", "cython", "mypy"} <= set(found)
    assert not {"pytest", "ruff"} & set(found)


def test_the_higher_of_two_floors_counts() -> None:
    """As numbers: 0.9 is lower than 0.27."""
    assert floors(project("trio>=0.9", build=("trio>=0.27",))) == {"trio": "0.27"}
    assert floors(project("trio>=0.27", build=("trio>=0.9",))) == {"trio": "0.27"}


def test_extras_count_but_for_the_developers() -> None:
    assert floors(project("a>=1", fuse=["b>=2.1"], dev=["c>=3"])) == {"a": "1", "b": "2.1"}


@pytest.mark.parametrize("requirement", ["trio", "trio>0.27", "trio>=0.27,<1", "trio==0.27"])
def test_a_requirement_of_another_form_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="NAME>=VERSION"):
        floors(project(requirement))


def test_constraints_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[project]\ndependencies = ["b>=2", "a>=1.5"]\n[project.optional-dependencies]\n'
        "[build-system]\nrequires = []\n"
    )
    main([str(path)])
    assert capsys.readouterr().out == "a==1.5\nb==2\n"
