"""Run every step signature once, through the functions that serve requests, on padding only."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm
from vllm.logger import init_logger

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.environment import cached_files
from vllm_gaudi_spec.records import DECODE, Planned
from vllm_gaudi_spec.runner.batch import make_batch, make_sample_batch
from vllm_gaudi_spec.sampling.params import Branch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from vllm_gaudi_spec.drafting.load import Draft
    from vllm_gaudi_spec.records import Shape
    from vllm_gaudi_spec.runner.model_runner import ModelRunner

    Job = tuple[str, Callable[[], None]]

logger = init_logger(__name__)


def manifest(runner: ModelRunner) -> set[Hashable]:
    """Every step signature that the configuration can reach: forwards by shape, sampling passes by rows and branch,
    drafts by rows, context and branch."""
    shapes, sampling, drafting = runner.shapes, runner.sampling, runner.drafting
    signatures: set[Hashable] = set(shapes.all())
    for num_rows, num_queries in product(shapes.decode_rows, shapes.decode_queries):
        signatures.update(sampling.every_signature(num_rows, num_queries))
    signatures.update(runner.report_signatures())
    signatures.update(runner.prompt_logprobs.signatures())
    if drafting is not None:
        signatures.update(drafting.signatures(sampling))
    return signatures


def warm_up(runner: ModelRunner, max_tokens: int) -> None:
    """Forwards of more than `max_tokens` tokens (-1: none) and sampling passes other than greedy are only listed: where
    nothing is compiled per shape, running them would cost time and gain nothing."""
    recorder, backend = runner.recorder, runner.backend
    recorder.expect(manifest(runner))
    if backend.captures and runner.shows_progress:
        write_manifest(runner)
    if environment.skip_warmup():
        logger.warning("Warm-up skipped (VGS_SKIP_WARMUP): first steps of each shape may be slow.")
        _done(runner)
        return
    jobs = list(_jobs(runner, max_tokens))
    kinds = Counter(kind for kind, _ in jobs)
    logger.info("Warm-up: %s.", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    shapes = runner.shapes
    logger.info(
        "Decodes of %s rows, %s queries and %s; prompt chunks of %s tokens over contexts of %s.",
        _listed(shapes.decode_rows),
        _listed(shapes.decode_queries),
        f"{_listed(shapes.entries)} blocks" if shapes.entries else f"contexts of {_listed(shapes.contexts)}",
        _listed(shapes.prefill_queries),
        _listed(shapes.contexts),
    )
    if estimate := backend.describe_warm_up(len(recorder.manifest)):
        logger.info("It may take %s.", estimate)
    started = time.perf_counter()
    with backend.compiling_only(), tqdm(jobs, desc="Warm-up", unit="run", disable=not runner.shows_progress) as bar:
        for kind, job in bar:
            bar.set_postfix_str(kind, refresh=False)
            job()
    backend.synchronize()
    if kinds["decodes"]:
        for loaded in (runner.target, runner.drafter):
            if loaded is not None:
                loaded.check_kv_is_written()
    else:
        logger.info("Warm-up ran no forward, so that nobody has looked whether all KV is written.")
    _done(runner)
    logger.info(
        "Warm-up took %.1f s; it ran %d of %d step signatures.",
        time.perf_counter() - started,
        len(recorder.warmed),
        len(recorder.manifest),
    )


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def write_manifest(runner: ModelRunner) -> None:
    """A JSON file, named after what is in it. A server runs without it."""
    model = runner.vllm_config.model_config
    device = {"device": runner.backend.name, "mode": runner.backend.mode, "dtype": str(model.dtype)}
    text = json.dumps(device | {"programs": sorted(map(str, runner.recorder.manifest))}, indent=1) + "\n"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        path = cached_files.own_folder(environment.cache_folder()) / "manifests" / f"{name}.json"
        cached_files.write(path, text.encode())
    except (OSError, RuntimeError) as error:  # no folder, no space, or no home
        logger.warning("The list of programs could not be written: %s.", error)
        return
    logger.info("The %d programs of this configuration are listed in %s.", len(runner.recorder.manifest), path)


def _done(runner: ModelRunner) -> None:
    runner.recorder.warm_up_done(runner.backend.num_host_reads)
    runner.backend.warmed_up()


def _jobs(runner: ModelRunner, max_tokens: int) -> Iterator[Job]:
    """Everything to run, and what it is called; the largest first."""
    everything = max_tokens < 0

    def chosen(num_tokens: int) -> bool:
        return everything or num_tokens <= max_tokens

    yield "states", partial(_touch_states, runner)
    for shape in runner.shapes.all():
        if chosen(shape.tokens):
            yield "decodes" if shape.phase == DECODE else "prompt chunks", partial(_forward, runner, shape)
    branches = sorted(runner.sampling.branches()) if everything else [Branch()]
    for num_rows, num_queries in product(reversed(runner.shapes.decode_rows), runner.shapes.decode_queries):
        if chosen(num_rows * num_queries):
            for branch in branches:
                yield "sampling passes", partial(_sample, runner, num_rows, num_queries, branch)
    if runner.drafting is not None:
        for num_rows, branch, draft in runner.drafting.rounds(runner.sampling):
            if chosen(num_rows) and (everything or branch == Branch()):
                yield "rounds of drafts", partial(_draft, runner, num_rows, branch, draft)


def _touch_states(runner: ModelRunner) -> None:
    runner.requests.warm_up()
    runner.kv_cache.warm_up()
    if runner.target.adapters is not None:
        runner.target.adapters.warm_up()
    if runner.backend.captures:
        runner.prompt_logprobs.warm_up(runner.recorder.saw)
    if runner.drafting is not None:
        runner.drafting.warm_up()


def _forward(runner: ModelRunner, shape: Shape) -> None:
    runner.forward(make_batch(runner.requests, Planned(shape=shape, requests=[], counts=[], finishes=[])))


def _sample(runner: ModelRunner, num_rows: int, num_queries: int, branch: Branch) -> None:
    batch = make_sample_batch(runner.requests, num_rows, num_queries, [], [])
    step, _ = runner.sample(batch, runner.sampling.inputs_of(batch, branch, {}))
    runner.send(step)
    if runner.drafting is not None and (drafts := runner.drafting.no_drafts(num_rows)) is not None:
        step.drafts = drafts
        runner.send(step)


def _draft(runner: ModelRunner, num_rows: int, branch: Branch, draft: Draft) -> None:
    batch = make_sample_batch(runner.requests, num_rows, 1, [], [])
    lengths_B = runner.backend.upload(torch.zeros(num_rows, dtype=torch.int32))
    draft(batch, lengths_B, runner.sampling.inputs_of(batch, branch, {}))
