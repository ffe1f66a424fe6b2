"""Run every shape once, through the functions that serve requests, on padding only."""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING

from tqdm import tqdm
from vllm.logger import init_logger

from vllm_gaudi_spec import config
from vllm_gaudi_spec.runner.batch import make_batch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from vllm_gaudi_spec.runner.drafting import Drafting
    from vllm_gaudi_spec.runner.model_runner import ModelRunner
    from vllm_gaudi_spec.runner.sampling import Sampling
    from vllm_gaudi_spec.runner.shapes import Shapes

logger = init_logger(__name__)


def manifest(shapes: Shapes, sampling: Sampling, drafting: Drafting | None) -> set[Hashable]:
    """Every step signature that the configuration can reach: forwards by shape, sampling passes by rows and branch,
    drafts by rows."""
    signatures: set[Hashable] = set(shapes.all())
    for num_rows, num_queries in product(shapes.decode_rows, shapes.decode_queries):
        signatures.update(sampling.every_signature(num_rows, num_queries))
    if drafting is not None:
        signatures.update(drafting.signatures(sampling))
    return signatures


def warm_up(runner: ModelRunner, shapes: Shapes, max_tokens: int) -> None:
    """Forwards of more than `max_tokens` tokens (-1: none) and sampling passes other than greedy are only listed: where
    nothing is compiled per shape, running them would cost time and gain nothing."""
    runner.recorder.expect(manifest(shapes, runner.sampling, runner.drafting))
    if config.skip_warmup():
        logger.warning("Warm-up skipped (VGS_SKIP_WARMUP): first steps of each shape may be slow.")
        runner.recorder.warm_up_done(runner.backend.num_host_reads)
        return
    chosen = [shape for shape in shapes.all() if max_tokens < 0 or shape.tokens <= max_tokens]
    started = time.perf_counter()
    for shape in tqdm(chosen, desc="Warm-up", unit="shape", disable=not runner.shows_progress):
        decode = shape.phase == "decode"
        runner.forward(make_batch(runner.requests, shape, [], [], [], starts_known=not decode))
        if decode:
            longest = max(shape.context - 1 - runner.num_drafts, 0)
            step = runner.finish([], shape.queries, longest, {}, runner.num_drafts, num_rows=shape.rows)
            if runner.drafting is not None:
                runner.drafting.propose_behind(step, runner.num_drafts)
    runner.recorder.warm_up_done(runner.backend.num_host_reads)
    logger.info(
        "Warm-up ran %d of %d step shapes in %.1f s; %d step signatures are expected.",
        len(chosen),
        len(shapes.all()),
        time.perf_counter() - started,
        len(runner.recorder.manifest),
    )
