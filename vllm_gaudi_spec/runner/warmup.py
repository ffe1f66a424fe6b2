"""Run every shape once, through the functions that serve requests, on padding only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tqdm import tqdm
from vllm.logger import init_logger

from vllm_gaudi_spec import config
from vllm_gaudi_spec.runner.batch import make_batch
from vllm_gaudi_spec.runner.sampling import Branch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from vllm_gaudi_spec.runner.model_runner import ModelRunner
    from vllm_gaudi_spec.runner.shapes import Shape, Shapes

logger = init_logger(__name__)


def manifest(shapes: Shapes, logprob_counts: tuple[int, ...]) -> set[Hashable]:
    """Every step signature that the configuration can reach: forwards by shape, finishes by shape and branch."""
    signatures: set[Hashable] = set(shapes.all())
    sampled = {(shape.rows, shape.queries if shape.phase == "decode" else 1) for shape in shapes.all()}
    signatures.update((*place, branch) for place in sampled for branch in Branch.every(logprob_counts))
    return signatures


def warm_up(runner: ModelRunner, shapes: Shapes, max_tokens: int) -> None:
    """Shapes of more than `max_tokens` tokens are only listed (-1: none): where nothing is compiled per shape,
    running the large ones would cost time and gain nothing."""
    runner.recorder.expect(manifest(shapes, runner.sampling.logprob_counts))
    if config.skip_warmup():
        logger.warning("Warm-up skipped (VGS_SKIP_WARMUP): first steps of each shape may be slow.")
        return
    chosen = [shape for shape in shapes.all() if max_tokens < 0 or shape.tokens <= max_tokens]
    started = time.perf_counter()
    for shape in tqdm(chosen, desc="Warm-up", unit="shape", disable=not runner.shows_progress):
        _run_padding(runner, shape)
    logger.info(
        "Warm-up ran %d of %d step shapes in %.1f s; %d step signatures are expected.",
        len(chosen),
        len(shapes.all()),
        time.perf_counter() - started,
        len(runner.recorder.manifest),
    )


def _run_padding(runner: ModelRunner, shape: Shape) -> None:
    decode = shape.phase == "decode"
    batch = make_batch(runner.requests, shape, [], [], [], starts_known=not decode)
    runner.finish(runner.forward(batch), {})
