"""Tiny models with scales, as a calibration leaves them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from fp8_calibration.folder import MEASURING_EXTENSION, measuring_config, serving_config
from fp8_calibration.scales import make_scales
from fp8_calibration.writing import write_files
from tests.full_tests.engines import engine, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import accepted
from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.quantization import files

METHODS = ("maxabs_pow2", "act_maxabs_pow2_weights_pcs_maxabs_pow2", "maxabs_arbitrary")
VOCAB = 256


@contextmanager
def quantizing(config: Path | None) -> Iterator[None]:
    """The environment of an engine whose target is measured or quantized by this file."""
    with pytest.MonkeyPatch.context() as patch:
        if config is not None:
            patch.setenv("QUANT_CONFIG", str(config))
        yield


def drafter(config: Path | None, **more: Any) -> dict[str, Any]:
    """The same for its drafter, as an option of the engine."""
    own = {} if config is None else {"draft_quant_config": str(config)}
    return {"additional_config": {"gaudi_spec": own | more}}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


class Calibrated:
    """Measurements and scales of a target and its drafter."""

    def __init__(self, folder: Path, has_drafter: bool) -> None:
        self.folder = folder
        self.roles = ("target", "draft") if has_drafter else ("target",)

    def prefix(self, role: str) -> Path:
        return self.folder / role

    def measuring(self, role: str) -> Path | None:
        if role not in self.roles:
            return None
        return write(self.folder / f"{role}_measure.json", measuring_config(self.prefix(role)))

    def serving(self, role: str, method: str, **changes: Any) -> Path:
        """A QUANT_CONFIG for this way of making scales."""
        prefix = self.prefix(role)
        for record in make_scales(files.read_world(prefix), method, "gaudi2"):
            write_files(prefix, record, method)
        content = serving_config(prefix, method, [], []) | changes
        return write(self.folder / f"{role}_{method}_{len(changes)}.json", content)


def calibrate(folder: Path, target: str, speculative: dict[str, Any] | None, **options: Any) -> Calibrated:
    """Measure both in one engine, on short prompts."""
    found = Calibrated(folder, speculative is not None)
    draft = drafter(found.measuring("draft"))
    with (
        quantizing(found.measuring("target")),
        engine(
            target, speculative_config=speculative, worker_extension_cls=MEASURING_EXTENSION, **draft, **options
        ) as llm,
    ):
        ask(llm, 4)
        llm.collective_rpc("save_measurements")
    return found


def ask(llm: LLM, count: int, num_tokens: int = 24, **options: Any) -> list[list[int]]:
    prompts = random_prompts([3, 17, 32, 33, 90, 150, 31, 64][:count], VOCAB)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=num_tokens, ignore_eos=True, **options)
        for i in range(count)
    ]
    return [list(output.outputs[0].token_ids) for output in generate(llm, prompts, params)]


def drafting(model: str) -> dict[str, Any]:
    return dict(method="draft_model", model=model, num_speculative_tokens=3, rejection_sample_method="strict")


def check_drafts(llm: LLM, least: int, count: int = 8, **options: Any) -> list[list[int]]:
    """Check that texts with drafts are those without, which are returned, and that more than `least` were accepted."""
    plain = ask(llm, count, extra_args={REQUEST_OPTION: 0}, **options)
    before = accepted(llm)
    assert ask(llm, count, **options) == plain
    assert accepted(llm) > before + least
    return plain
