"""Who may import whom, who reads the environment, who patches vLLM: read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "vllm_gaudi_spec"
FILES = sorted(PACKAGE.rglob("*.py"))

# Folder or module -> what of ours it may import. What is not listed is not done.
MAY_IMPORT = {
    "__init__": {"compat", "devices", "platforms", "integrations", "versions"},
    # On other releases of vLLM than ours: nothing that knows one of those.
    "integrations": {
        *("integrations", "config", "environment", "compat.patching", "drafting.vocabulary", "drafting.universal"),
    },
    "platforms": {
        *("platforms", "devices", "config", "environment", "compat", "quantization.kv_scheme", "refusals"),
        *("runner.shapes", "versions"),
    },
    "worker": {"devices", "config", "drafting.memory", "environment", "lora.manager", "runner", "scheduling.outputs"},
    "scheduling": {"devices", "config", "records", "runner.shapes", "scheduling"},
    "runner": {
        "drafting",
        "sampling",
        "attention",
        "devices.base",
        "compat",
        "config",
        "environment",
        "quantization",
        "lora",
        "records",
        "runner",
        "scheduling",
    },
    "lora": {"lora", "compat.messages", "config", "devices.base", "runner.requests"},
    "attention": {"devices", "config", "attention"},
    "devices": {
        "compat",
        "config",
        "environment",
        "devices",
        "attention",
        "emulator",
        "quantization",
        "records",
        "sampling",
    },
    "emulator": {"emulator", "config", "devices.hpu.compile_time"},
    "records": {"attention.inputs"},
    "drafting": {
        *("attention", "compat", "config", "devices.base", "drafting", "environment"),
        *("quantization.models", "records", "runner", "sampling", "scheduling"),
    },
    "sampling": {"compat", "config", "devices.base", "records", "runner.requests", "sampling"},
    "config": {"drafting.table", "sampling.rules.table"},
    "environment": {"config", "environment"},
    "refusals": {
        *("devices.base", "config", "drafting.table", "quantization.config", "refusals", "sampling.rules.table"),
    },
    "compat": {"compat", "config", "drafting.table", "environment", "sampling.rules.table", "scheduling"},
    "quantization": {
        "quantization",
        "config",
        "environment",
        "attention.backend",
        "attention.operations",
        "devices.base",
    },
    "versions": set(),
    # Nothing of the engine imports these.
    "tools": set(),
    "tools.io": {"environment.cached_files", "tools.io"},
    "tools.demo_model": {"environment"},
    "tools.tune": {
        *("tools.tune", "tools.demo_model", "tools.io", "quantization", "compat.messages", "devices", "config"),
        *("drafting.table", "emulator.cost", "emulator.counters", "environment"),
    },
    "tools.report": {"tools.report", "tools.io", "drafting.table", "environment", "versions"},
    "tools.compare": {
        *("tools.compare", "tools.demo_model", "tools.io", "tools.report", "compat.messages"),
        *("devices", "config", "drafting.table", "environment", "platforms", "sampling.rules.table"),
    },
    # Looks into the parts that decide what can be served, and changes nothing.
    "tools.doctor": {
        *("tools.doctor", "tools.io", "tools.tune.builtin_prompts", "tools.tune.estimates"),
        *("compat.messages", "devices", "config", "environment", "integrations", "platforms"),
        "drafting.universal",
        *("quantization.fingerprint", "refusals", "drafting.memory", "versions"),
    },
    "tools.cli": {
        *("tools.cli", "tools.compare", "tools.demo_model", "tools.doctor", "tools.io", "tools.report", "tools.tune"),
        *("__version__", "compat.messages", "devices", "config", "drafting.table", "emulator", "environment"),
        *("platforms", "versions"),
    },
}


def part_of(path: Path) -> str:
    """A folder or a loose module; of tools, one of these."""
    folder, *rest = path.relative_to(PACKAGE).parts
    name = f"tools.{rest[0]}" if folder == "tools" and rest[0] != "__init__.py" else folder
    return name.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_top_level_has_only_doors() -> None:
    doors = {"__init__.py", "versions.py", "config.py", "records.py", "worker.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == doors


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_directions(path: Path) -> None:
    allowed = MAY_IMPORT[part_of(path)]
    ours = {name.removeprefix("vllm_gaudi_spec.") for name in imports(path) if name.startswith("vllm_gaudi_spec.")}
    bad = {name for name in ours if not any(name == ok or name.startswith(f"{ok}.") for ok in allowed)}
    assert not bad, f"{path.name} may not import {sorted(bad)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_vendor_packages_and_environment_have_one_door(path: Path) -> None:
    names = set(imports(path))
    if part_of(path) != "devices":
        assert not {name for name in names if name.split(".")[0] in ("habana_frameworks", "torch_npu")}
    source = path.read_text()
    if part_of(path) not in ("environment", "tools.demo_model"):
        assert "os.environ" not in source
        assert "getenv" not in source


def test_sampling_rules_and_plain_ops_do_not_know_vllm() -> None:
    sampling = PACKAGE / "sampling"
    tensors_only = [sampling / f"{name}.py" for name in ("drafts", "logits", "noise", "stop")]
    for path in [*tensors_only, *(sampling / "rules").glob("*.py"), PACKAGE / "devices" / "common" / "torch_ops.py"]:
        assert not {name for name in imports(path) if name.split(".")[0] == "vllm"}, path.name


def test_importing_the_package_is_cheap() -> None:
    """vLLM imports it while it is itself half imported."""
    code = "import sys, vllm_gaudi_spec; print([m for m in ('vllm', 'torch', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_foreign_names_are_reassigned_in_compat_only() -> None:
    """An assignment to an attribute of an imported module anywhere else is a patch in hiding."""
    for path in FILES:
        if part_of(path) == "compat":
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
