"""docs/models.md names every class of vLLM's text and pooling models that is refused by its name or its kind."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from vllm.model_executor.models import registry

from vllm_gaudi_spec.recurrent.table import SERVED
from vllm_gaudi_spec.refusals import models as refusals

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
TEXT = registry._TEXT_GENERATION_MODELS | registry._EMBEDDING_MODELS | registry._LATE_INTERACTION_MODELS
TEXT |= registry._REWARD_MODELS | registry._TOKEN_CLASSIFICATION_MODELS | registry._SEQUENCE_CLASSIFICATION_MODELS


def keeps_states(module: str, name: str) -> bool:
    """By the bases of its class: to import all of them takes minutes."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    base = folder / (
        module.removeprefix("vllm.").replace(".", "/") if "." in module else f"model_executor/models/{module}"
    )
    one_file = base.with_suffix(".py")
    sources = [path.read_text() for path in ([one_file] if one_file.exists() else base.rglob("*.py"))]
    found = [bases for source in sources for bases in re.findall(rf"^class {name}\(([^)]*)\)", source, re.MULTILINE)]
    parents = {parent for bases in found for parent in re.findall(r"\w+", bases)}
    return bool(parents & {"IsHybrid", "IsAttentionFree"}) or any(
        keeps_states(module, parent) for parent in parents if parent != name
    )


def rows() -> set[str]:
    section = PAGE.read_text().split("\n## Refused on the CPU\n")[1].split("\n## ")[0]
    return set(re.findall(r"`(\w+)`", section))


def test_every_class_that_is_refused_by_name_has_a_row() -> None:
    named = {*refusals._EMBEDDINGS_ONLY, *refusals._SLOPES_OF_ROOTS, *refusals._SINK_KEYS}
    assert named - rows() == set()


def test_every_class_with_recurrent_state_that_is_not_served_has_a_row() -> None:
    found = {arch for arch, (module, name) in TEXT.items() if keeps_states(module, name)}
    assert len(found) > len(SERVED) / 2, found
    assert found - set(SERVED) - rows() == set()
    assert not rows() & set(SERVED)
