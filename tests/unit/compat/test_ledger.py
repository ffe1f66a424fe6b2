"""What holds for every patch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.config import SpeculativeConfig
from vllm.config import speculative as upstream_speculative
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from tests.unit.compat.test_configuration import values_of
from vllm_gaudi_spec import compat
from vllm_gaudi_spec.compat import configuration

FILES = sorted(path for path in Path(compat.__file__).parent.rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_patch_is_listed_with_its_reason_and_its_end(path: Path) -> None:
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    patches = [node for node in functions if not node.name.startswith("_")]
    assert patches
    for patch in patches:
        assert hasattr(compat, patch.name), f"{patch.name} is not in the list"
        said = ast.get_docstring(patch) or ""
        assert "\nReason: " in said, patch.name
        assert "\nRemove when: " in said, patch.name


def test_patches_are_put_on_once() -> None:
    compat.apply()
    compat.apply()
    wrapped = (
        (Scheduler, "update_from_output"),
        (Scheduler, "make_spec_decoding_stats"),
        (Scheduler, "make_stats"),
        (Scheduler, "_update_after_schedule"),
        (PrometheusStatLogger, "__init__"),
        (PrometheusStatLogger, "record"),
        (RequestSpecDecodeMetrics, "observe"),
        (SamplingParams, "_validate_spec_decode"),
        (upstream_speculative, "has_arctic_inference"),
    )
    for owner, name in wrapped:
        assert not hasattr(getattr(owner, name).__wrapped__, "__wrapped__"), name
    for name, more in configuration._MORE_VALUES.items():
        values = values_of(SpeculativeConfig.__dataclass_fields__[name].type)
        assert values[-len(more) :] == more
        assert len(set(values)) == len(values)
