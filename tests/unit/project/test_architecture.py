"""Check what import-linter (pyproject.toml) does not: circles of modules, hidden patches, a cheap import, new rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "vllm_gaudi_spec"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the dotted name below the package; that of a folder is its `__init__`'s."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Return the modules that each module of the package imports, also for annotations alone."""
    modules = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm_gaudi_spec"):
                continue
            source = (node.module or "").removeprefix("vllm_gaudi_spec").lstrip(".")
            for alias in node.names:
                nested = f"{source}.{alias.name}".lstrip(".")
                graph[name].add(nested if nested in modules else source)
        graph[name] &= set(modules) - {name}
    return graph


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_contract_on_the_tools_covers_every_room() -> None:
    """import-linter checks only the modules that a contract lists."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    (listed,) = (each["source_modules"] for each in settings["contracts"] if each["name"].endswith("know the tools"))
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"tools"}
    assert rooms <= {name.removeprefix("vllm_gaudi_spec.") for name in listed}


def test_importing_the_package_is_cheap() -> None:
    """vLLM imports it while vLLM itself is half imported."""
    code = "import sys, vllm_gaudi_spec; print([m for m in ('vllm', 'torch', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_foreign_names_are_reassigned_in_upstream_only() -> None:
    """An assignment to an attribute of an imported module anywhere else is a patch in hiding."""
    for path in FILES:
        if path.is_relative_to(PACKAGE / "upstream"):
            continue
        tree = ast.parse(path.read_text())
        modules = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    assert target.value.id not in modules, f"{path.name}:{node.lineno}"
