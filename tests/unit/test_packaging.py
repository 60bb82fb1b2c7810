"""What an installed Legato holds: every folder, and no `__init__.py` that would shadow others."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("bench", "cluster", "kernels", "plan", "protos", "text", "worker")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders_with_modules() -> set[str]:
    return {
        "legato." + ".".join(path.parent.relative_to(ROOT).parts)
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
    }


def test_every_folder_is_packaged_and_every_package_is_a_folder() -> None:
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders_with_modules()


def test_the_top_folders_are_namespace_packages() -> None:
    # A regular package of that name in site-packages must win over our bare folder.
    assert [part for part in PARTS if (ROOT / part / "__init__.py").exists()] == []


def test_package_dir_names_every_part() -> None:
    expected = {f"legato.{part}": part for part in PARTS}
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == expected


def test_the_command_exists() -> None:
    module, name = PYPROJECT["project"]["scripts"]["legato"].split(":")
    source = (ROOT / Path(*module.split(".")[1:])).with_suffix(".py").read_text()
    functions = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    assert name in functions


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_clean_removes_the_compiled_kernels() -> None:
    # Without a compiler the next installation would serve with those of other sources.
    printed = subprocess.run(
        ["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    assert " kernels/native_*.so " in printed.stdout
