"""Check that vLLM still has the methods that our classes override, with the same parameters."""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import vllm_gaudi_spec
from vllm_gaudi_spec.upstream.release import FROM_0_33

PACKAGE = Path(vllm_gaudi_spec.__file__).parent

# A release of vLLM may rename these or change their parameters, and ours would then be ignored without an error.
# Whether vLLM still calls them, only the tests of what they do can tell.
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "LRUCacheWorkerLoRAManager._load_adapter": ("lora_request",),
    "MoERunner._maybe_apply_routed_scale_to_output": ("shared_output", "fused_output"),
    "MoERunner._select_forward": (),
    "Platform._align_hybrid_block_size": ("vllm_config", "backend_cls"),
    "RayExecutorV2._get_actor_resource_kwargs": (),
    "RayExecutorV2._init_executor": (),
    "Scheduler._free_request": ("request", "delay_free_blocks"),
    "Scheduler._get_local_prefix_cache_hit": ("request", *(["max_cache_hit_length"] if FROM_0_33 else [])),
    "Scheduler._mamba_block_aligned_split": (
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ),
    "Scheduler._try_schedule_encoder_inputs": (
        "request",
        "num_computed_tokens",
        "num_new_tokens",
        "encoder_compute_budget",
        "shift_computed_tokens",
    ),
}
"""Private methods of vLLM that our classes override, with their parameters, by the class of vLLM."""


@cache
def our_classes() -> dict[str, tuple[ast.ClassDef, dict[str, str]]]:
    """Return each class by its dotted name, with the dotted names of what its module imports and defines.

    They are not imported: that would register layers, and some need a card's packages.
    """
    classes: dict[str, tuple[ast.ClassDef, dict[str, str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "integrations" in parts:  # it runs on other releases of vLLM
            continue
        tree, module, names = ast.parse(path.read_text()), ".".join(parts), {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                names[node.name] = f"{module}.{node.name}"
                classes[names[node.name]] = node, names
    return classes


def vllm_bases(name: str) -> Iterator[type]:
    """Yield the classes of vLLM from which the class of this dotted name derives."""
    if name in our_classes():
        node, names = our_classes()[name]
        for base in node.bases:
            yield from vllm_bases(names.get(ast.unparse(base).split("[")[0], ""))
    elif name.startswith(("vllm.", "vllm_gaudi_spec.upstream.")):
        module, _, attribute = name.rpartition(".")
        yield getattr(importlib.import_module(module), attribute)


def overrides() -> Iterator[tuple[str, ast.FunctionDef, type]]:
    """Yield the name of each of our classes, each method that it overrides, and the class of vLLM that has it."""
    for name, (node, _) in our_classes().items():
        bases = list(vllm_bases(name))
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                yield from ((name, method, base) for base in bases if hasattr(base, method.name))


def parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(method).parameters.values() if each.name not in ("self", "cls")]


def test_overridden_private_methods_are_as_listed() -> None:
    found = {
        f"{base.__name__}.{method.name}": tuple(each.name for each in parameters(getattr(base, method.name)))
        for _, method, base in overrides()
        if method.name.startswith("_")
    }
    assert {name: found.get(name) for name in OVERRIDDEN} == OVERRIDDEN
    assert {name.split(".")[1] for name in found} <= {name.split(".")[1] for name in OVERRIDDEN}


def test_overrides_take_what_vllm_passes() -> None:
    num_checked = 0
    for name, method, base in overrides():
        original, ours = getattr(base, method.name), method.args
        if inspect.isroutine(original) and not (ours.vararg or ours.kwarg):
            taken = {each.arg for each in (*ours.posonlyargs, *ours.args, *ours.kwonlyargs)}
            passed = {
                each.name for each in parameters(original) if each.kind.name not in ("VAR_POSITIONAL", "VAR_KEYWORD")
            }
            assert passed <= taken, f"{name}.{method.name}"
            num_checked += 1
    assert num_checked > 100
