"""What holds for every patch."""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import SpeculativeConfig
from vllm.config import speculative as upstream_speculative
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from tests.unit.upstream.test_configuration import values_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.upstream import configuration, patching

# Every module but the tools for patches and those that offer names of vLLM, which import it at their top.
_TOOLS = ("__init__.py", "patching.py", "release.py")
FILES = sorted(
    path
    for path in Path(upstream.__file__).parent.glob("*.py")
    if path.name not in _TOOLS and "\nfrom vllm." not in path.read_text()
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_patch_is_listed_with_its_reason_and_its_end(path: Path) -> None:
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    patches = [node for node in functions if not node.name.startswith("_")]
    assert patches
    for patch in patches:
        assert hasattr(upstream, patch.name), f"{patch.name} is not in the list"
        said = ast.get_docstring(patch) or ""
        assert "\nReason: " in said, patch.name
        assert "\nRemove when: " in said, patch.name


def test_patches_are_put_on_once() -> None:
    upstream.apply()
    upstream.apply()
    wrapped = (
        (PrometheusStatLogger, "__init__"),
        (PrometheusStatLogger, "record"),
        (SamplingParams, "_validate_spec_decode"),
        (upstream_speculative, "has_arctic_inference"),
    )
    for owner, name in wrapped:
        assert not hasattr(getattr(owner, name).__wrapped__, "__wrapped__"), name
    for name, more in configuration._MORE_VALUES.items():
        values = values_of(SpeculativeConfig.__dataclass_fields__[name].type)
        assert values[-len(more) :] == more
        assert len(set(values)) == len(values)


def patches_made(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Of each patched function of vLLM: the original, and what is called in its place."""
    made: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def note(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = inspect.unwrap(getattr(owner, name))
        made[f"{getattr(original, '__qualname__', name)}"] = (original, wrapper)

    monkeypatch.setattr(patching, "wrap", note)
    monkeypatch.setattr(configuration, "raise_unchanged", patching.do_nothing)  # constructors, which pass on all
    for path in FILES:
        module = importlib.import_module(f"{upstream.__name__}.{path.stem}")
        if hasattr(module, "wrap"):
            monkeypatch.setattr(module, "wrap", note)
        elif not hasattr(module, "patches"):
            continue
        for name in vars(module):
            patch = vars(module)[name]
            if name.startswith("_") or not inspect.isfunction(patch) or patch.__module__ != module.__name__:
                continue
            patch(*(lambda *args, **named: None for _ in inspect.signature(patch, follow_wrapped=False).parameters))
    return made


def test_patched_functions_take_what_the_originals_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """By position and by name: callers of vLLM's use both."""
    made = patches_made(monkeypatch)
    assert "DefaultModelLoader._prepare_weights" in made
    assert [
        problem for name, patch in made.items() if name not in CALLED_ONE_WAY for problem in differences(name, *patch)
    ] == []


# Called by the interpreter, by position; called by one line of vLLM's, by name.
CALLED_ONE_WAY = ("custom_excepthook", "excepthook", "CPUUnquantizedExperts.apply")


def differences(name: str, original: Callable[..., Any], wrapper: Callable[..., Any]) -> Iterator[str]:
    own = [*inspect.signature(wrapper).parameters.values()]
    takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own)
    takes_names = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own)
    by_position = [parameter for parameter in own if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]
    for index, theirs in enumerate(inspect.signature(original).parameters.values()):
        if theirs.kind is theirs.VAR_KEYWORD:
            if not takes_names:
                yield f"{name}: any by name"
            continue
        mine = by_position[index] if index < len(by_position) else None
        has_name = theirs.kind is theirs.POSITIONAL_OR_KEYWORD and theirs.name != "self"
        if mine is None and not takes_more:
            yield f"{name}: {theirs.name} by position"
        if has_name and not (mine.name == theirs.name if mine is not None else takes_names):
            yield f"{name}: {theirs.name} by name"
        if mine is not None and theirs.default is not theirs.empty and mine.default != theirs.default:
            yield f"{name}: without {theirs.name}"


def test_upstream_still_has_no_place_for_our_series() -> None:
    """Fails when upstream's record has other fields: then `carry_metrics` may go, or has to know of them."""
    names = [field.name for field in dataclasses.fields(SchedulerStats) if field.name != "gaudi_spec"]
    assert names == [
        *("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "num_kv_fetch_reqs_by_stage"),
        *("step_counter", "current_wave", "kv_cache_usage", "iteration_details", "prefix_cache_stats"),
        *("connector_prefix_cache_stats", "kv_cache_eviction_events", "spec_decoding_stats", "kv_connector_stats"),
        *("ec_connector_stats", "waiting_lora_adapters", "running_lora_adapters", "cudagraph_stats", "perf_stats"),
    ]
