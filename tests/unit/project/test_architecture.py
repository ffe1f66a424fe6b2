"""Check what import-linter (pyproject.toml) does not: circles of modules, hidden patches, a cheap import, new rooms."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import grimp

from tests.support.processes import run_code

PACKAGE = Path(__file__).parents[3] / "vllm_gaudi_spec"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_no_two_rooms_import_each_other() -> None:
    """At run time: annotations bring no code along. Where two need the same thing, move it into a room below them."""
    graph = grimp.build_graph(PACKAGE.name, exclude_type_checking_imports=True)
    for room in graph.find_children(PACKAGE.name):
        graph.squash_module(room)
    edges = {(room, other) for room in graph.modules for other in graph.find_modules_directly_imported_by(room)}
    assert edges
    assert {(one, other) for one, other in edges if one < other and (other, one) in edges} == set()


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(PACKAGE.name)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert any(imports.values())
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle


def test_importing_the_package_is_cheap() -> None:
    """vLLM imports it while vLLM itself is half imported."""
    code = "import sys, vllm_gaudi_spec; print([m for m in ('vllm', 'torch', 'numpy') if m in sys.modules])"
    result = run_code(code, check=True)
    assert result.stdout.strip() == "[]"


def test_private_modules_of_vllm_are_imported_in_upstream_only() -> None:
    """docs/explanation/architecture.md lists the public ones; integrations/ runs on other releases of vLLM."""
    page = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
    section = page.read_text().split("\n## vLLM's interfaces\n")[1]
    public = set(re.findall(r"`(vllm[\w.]*)`", section))
    assert "vllm.config" in public
    spec = find_spec("vllm")
    site = Path(spec.submodule_search_locations[0]).parent
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in ("upstream", "integrations"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for name in (source + alias.name for alias in node.names):
                    file = site / name.replace(".", "/")
                    module = name if file.is_dir() or file.with_suffix(".py").is_file() else name.rpartition(".")[0]
                    assert module.split(".")[0] != "vllm" or module in public, f"{path}:{node.lineno}: {module}"


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
