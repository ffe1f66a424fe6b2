"""Who may import whom, who reads the environment, who patches vLLM: read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Set
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
        *("platforms", "devices", "config", "environment", "compat", "quantization.dequantized"),
        *("quantization.kv_scheme", "recurrent.table", "refusals"),
        *("runner.shapes", "versions"),
    },
    "worker": {
        *("devices", "config", "drafting.memory", "environment", "lora.manager", "quantization.config", "runner"),
        *("scheduling.outputs", "self_test"),
    },
    # What others build on, from above: nothing of them imports it.
    "self_test": {
        *("self_test", "attention", "config", "devices", "environment", "records", "runner.requests", "sampling"),
        *("quantization.fp8", "quantization.layers"),
    },
    "scheduling": {
        *("devices", "config", "environment", "records", "recurrent.table", "runner.shapes", "sampling.noise"),
        *("scheduling", "versions"),
    },
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
        "recurrent",
        "runner",
        "scheduling",
    },
    "recurrent": {"attention.metadata", "attention.operations", "recurrent"},
    "lora": {"lora", "config", "devices.base", "runner.requests"},
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
    "records": {"attention.metadata"},
    "drafting": {
        *("attention", "compat", "config", "devices.base", "drafting", "environment"),
        *("quantization.models", "records", "runner", "sampling", "scheduling"),
    },
    "sampling": {"compat", "config", "devices.base", "records", "runner.requests", "sampling"},
    "config": {"drafting.table", "sampling.rules.table"},
    "environment": {"config", "environment"},
    "refusals": {
        *("devices.base", "config", "environment", "drafting.table", "quantization.checkpoint", "quantization.config"),
        *("quantization.dequantized", "quantization.fingerprint", "quantization.formats", "quantization.kv_scheme"),
        *("recurrent.table", "refusals", "sampling.logit_edits", "sampling.rules.table"),
    },
    "compat": {"compat", "config", "drafting.table", "environment", "sampling.rules.table", "scheduling", "versions"},
    "quantization": {
        "quantization",
        "config",
        "environment",
        "attention.backend",
        "attention.operations",
        "devices.base",
    },
    "versions": {"__version__"},
    # Links to models and prompts, which are data.
    "demo": set(),
    # Nothing of the engine imports these.
    "tools": set(),
    "tools.io": {"config", "environment.cached_files", "tools.io"},
    "tools.demo_model": {"compat", "environment"},
    "tools.estimate": {
        *("tools.estimate", "config", "devices.common.expert_forms", "drafting.table", "emulator.cost"),
        *("emulator.counters", "recurrent"),
    },
    "tools.tune": {
        *("tools.tune", "tools.demo_model", "tools.estimate", "tools.io", "tools.report", "quantization", "devices"),
        *("config", "drafting.table", "environment", "records", "runner.model_runner"),
    },
    "tools.report": {"tools.report", "tools.io", "config", "drafting.table", "environment", "versions"},
    "tools.compare": {
        *("tools.compare", "tools.demo_model", "tools.io", "tools.report"),
        *("devices", "config", "drafting.table", "environment", "platforms", "records", "sampling.rules.table"),
        *("runner.model_runner", "runner.report"),
    },
    # A server is asked over HTTP; of the engine it knows the names of the metrics.
    "tools.live": {"tools.live", "scheduling.metrics"},
    # Looks into the parts that decide what can be served, and changes nothing.
    "tools.doctor": {
        *("tools.doctor", "tools.io", "tools.estimate.outline"),
        *("devices", "config", "environment", "integrations", "platforms"),
        "drafting.universal",
        *("quantization.config", "quantization.fingerprint", "refusals", "drafting.memory", "versions"),
        "recurrent.table",
    },
    "tools.cli": {
        *("tools.cli", "tools.compare", "tools.demo_model", "tools.doctor", "tools.estimate", "tools.io", "tools.live"),
        *("tools.report", "tools.tune", "__version__", "devices", "config", "drafting.table", "emulator"),
        *("environment", "platforms", "self_test", "versions"),
    },
}

PROPOSER = "a proposer"
"""Of drafting/: every file that is not named. So a drafter needs no rule of its own."""

# Inside a room: module -> which others of the room it may import. `*` is all of them.
_SHARED = {"base", "guard", "kv_sync", "vocabulary"}
ROOMS: dict[str, dict[str, Set[str]]] = {
    "drafting": {
        "__init__": set(),
        "table": set(),
        "proposers": {"base", "table", "universal.pairs"},
        # What everybody stands on knows nobody.
        **dict.fromkeys((*_SHARED, "memory"), frozenset()),
        "models": {"table"},
        "choice": {"memory"},
        "history": set(),
        # Proposers, and how the KV of each follows the target.
        PROPOSER: {"base", "proposers"},
        "draft_model": {"base", "kv_sync", "proposers", "universal.pairs", "vocabulary"},
        "head": {"base", "draft_model", "kv_sync", "proposers", "vocabulary"},
        "medusa": {"base", "draft_model", "head", "proposers", "vocabulary"},
        # Two vocabularies.
        "universal.__init__": set(),
        "universal.token_bytes": set(),
        "universal.encoder": {"universal.token_bytes"},
        "universal.vocab_map": {"universal.token_bytes"},
        "universal.timeline": {"universal.encoder", "universal.token_bytes"},
        "universal.pairs": {
            *("vocabulary", "universal.encoder", "universal.timeline", "universal.token_bytes", "universal.vocab_map"),
        },
        # When drafts are made. No kind knows another.
        "on_device": {*_SHARED, "choice", "universal.pairs"},
        "on_host": {*_SHARED, "history"},
        "universal.text_drafting": {
            *(*_SHARED, "choice", "draft_model", "history", "memory", "universal.pairs", "universal.timeline"),
        },
        "load": {"*"},
    },
    "runner": {
        **dict.fromkeys(
            ("__init__", "graphs", "hidden_states", "kv_cache", "model", "prompt_embeds", "requests"), frozenset()
        ),
        "shapes": {"graphs"},
        "memory": {"graphs"},
        "batch": {"hidden_states", "requests", "shapes"},
        "sample_shapes": {"shapes"},
        "data_parallel": {"shapes"},
        "device_step": {"batch", "hidden_states", "model", "requests"},
        "report": {"graphs", "model"},
        "encoders": {"shapes"},
        "media_store": {"encoders", "graphs"},
        "multimodal": {"encoders", "media_store", "requests"},
        "pooling": {"hidden_states", "report", "requests"},
        "snapshots": {"requests"},
        # Not the model runner: warm-up names the parts that it runs.
        "warmup": {
            *(
                "batch",
                "graphs",
                "kv_cache",
                "memory",
                "model",
                "multimodal",
                "pooling",
                "report",
                "requests",
                "sample_shapes",
                "shapes",
                "snapshots",
            ),
        },
        "profile": {"graphs", "memory", "model_runner", "warmup"},
        "model_runner": {"*"},
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


def module_of(path: Path) -> str:
    """Its dotted name inside the package; that of a folder is its `__init__`'s."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, for annotations too."""
    modules = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # A name out of a folder is a module of it, or stands in its `__init__`.
                nested = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [one if one.removeprefix("vllm_gaudi_spec.") in modules else node.module for one in nested]
            else:
                continue
            ours = {one.removeprefix("vllm_gaudi_spec.") for one in found if one.startswith("vllm_gaudi_spec.")}
            graph[name] |= (ours & set(modules)) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules each of which reaches all others of its set."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, waiting = set(), [start]
        while waiting:
            fresh = graph[waiting.pop()] - found
            found |= fresh
            waiting += fresh
        reached[start] = found
    return {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }


def test_imports_have_no_circles() -> None:
    """For annotations too: a circle of types is a circle of ideas."""
    assert circles(import_graph()) == set()


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(graph) == {frozenset("abc"), frozenset("de")}


@pytest.mark.parametrize("room", ROOMS)
def test_import_directions_inside_a_room(room: str) -> None:
    graph, rules = import_graph(), ROOMS[room]
    listed = {name.removeprefix(f"{room}.") for name in graph if name.startswith(f"{room}.")}
    folders = {"universal"} & listed
    named = {name.removesuffix(".__init__") for name in rules if name not in ("__init__", PROPOSER)}
    assert named <= listed
    others = listed - named
    assert not others or PROPOSER in rules, f"ROOMS has no rule for {sorted(others)}"
    everyone = {name: allowed for name, allowed in rules.items() if name != PROPOSER}
    for name, allowed in (everyone | dict.fromkeys(others, rules.get(PROPOSER, set()))).items():
        module = f"{room}.{name}".removesuffix(".__init__")
        inside = {one.removeprefix(f"{room}.") for one in graph[module] if one.startswith(f"{room}.")} - folders
        assert allowed == {"*"} or inside <= allowed, f"{module} may not import {sorted(inside - allowed)}"


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
