"""Measure the largest value of every layer of a target and its drafter, in the engine that will serve them.

Prompts run in chunks. After each chunk, the ranks write their maxima so far, which are merged into those of earlier
runs, and the number of finished prompts is stored, so that an interrupted run continues after its last chunk.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8_calibration.folder import (
    DRAFT,
    MEASURING_EXTENSION,
    TARGET,
    Folder,
    Role,
    hash_prompts,
    measuring_config,
    read_json,
    write_json,
)
from fp8_calibration.scales import merge
from fp8_calibration.writing import write_files
from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.files import QuantFilesError
from vllm_gaudi_spec.quantization.fingerprint import fingerprint
from vllm_gaudi_spec.tools.io.output import counted
from vllm_gaudi_spec.tools.io.prompts import load_prompts

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True, kw_only=True)
class Run:
    """The models to measure, and the options of the engine that measures them."""

    model: str
    draft: str | None = None
    method: str | None = None
    """vLLM's name of the speculation method; None measures the target alone."""
    num_drafts: int = 3
    world: int = 1
    batch_size: int = 8
    max_tokens: int = 32
    max_prompt_tokens: int = 512
    engine: dict[str, Any] = field(default_factory=dict)
    """Further options of the engine, which take precedence."""

    @property
    def roles(self) -> list[str]:
        return [TARGET, DRAFT] if self.method else [TARGET]


def measure(folder: Folder, run: Run, *, fresh: bool = False) -> int:
    """Run the prompts that were not measured yet, and return their number.

    QUANT_CONFIG in the environment must name the target's `measure_config`, which is written before the engine starts.
    """
    prompts = load_prompts(str(folder.prompts))
    if fresh:
        _forget(folder)
    llm = None
    try:
        if not all(_fingerprint(run).values()):
            llm = _open(folder, run, prompts)  # downloads models that are named by their id
        identity = _identity(run, prompts)
        done = before = _claim(folder, run, identity)
        if done == len(prompts):
            return 0
        llm = llm or _open(folder, run, prompts)
        for chunk in _chunks(prompts, done, run.batch_size):
            _generate(llm, run, chunk)
            llm.collective_rpc("save_measurements")
            for name in run.roles:
                _merge_files(folder.role(name), run.world, identity[name])
            done += len(chunk)
            write_json(folder.progress, identity | {"done": done, "of": len(prompts)})
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
    return done - before


# ---- what was done before -----------------------------------------------------------------------------


def _identity(run: Run, prompts: Sequence[str]) -> dict[str, Any]:
    settings = {k: v for k, v in asdict(run).items() if k not in ("model", "draft", "batch_size")}
    return _fingerprint(run) | {"prompts": hash_prompts(prompts), "settings": settings}


def _fingerprint(run: Run) -> dict[str, str]:
    """Fingerprint the models by role; a head that is part of the target has the target's fingerprint."""
    models = {TARGET: run.model, DRAFT: run.draft or run.model}
    return {name: fingerprint(models[name]) for name in run.roles}


def _claim(folder: Folder, run: Run, identity: dict[str, Any]) -> int:
    """Return how many prompts were measured before, and claim the folder for this run."""
    stored = read_json(folder.progress) if folder.progress.exists() else {}
    for key in sorted({*identity, TARGET, DRAFT}) if stored else ():
        if stored.get(key) != identity.get(key):
            raise QuantFilesError(
                f"{folder.root} has measurements with another {key}; choose another --out, or add --fresh"
            )
    done = int(stored.get("done", 0))
    if done:
        for name in run.roles:
            files.read_world(folder.role(name).measured, run.world)
        print(f"{done} of {stored['of']} prompts were measured before", file=sys.stderr, flush=True)
        return done
    for name in (TARGET, DRAFT):
        if not stored and files.find_ranks(folder.role(name).measured):
            raise QuantFilesError(
                f"{folder.progress} is missing, although there are measurements; start over with --fresh"
            )
        _remove(folder.role(name).measured.parent)  # left by an interrupted first chunk
    write_json(folder.progress, identity | {"done": 0})
    return 0


def _forget(folder: Folder) -> None:
    folder.progress.unlink(missing_ok=True)
    for name in (TARGET, DRAFT):
        _remove(folder.role(name).folder)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


# ---- running ------------------------------------------------------------------------------------------


def _open(folder: Folder, run: Run, prompts: Sequence[str]) -> LLM:
    from vllm import LLM

    for name in run.roles:
        role = folder.role(name)
        _remove(role.raw.parent)
        write_json(role.measure_config, measuring_config(role.raw))
    options: dict[str, Any] = dict(
        model=run.model,
        tensor_parallel_size=run.world,
        max_num_seqs=run.batch_size,
        max_model_len=_measure_longest(run, prompts) + run.max_tokens,
        enable_prefix_caching=False,  # every token of each prompt has to be computed
        worker_extension_cls=MEASURING_EXTENSION,
    )
    if run.method:
        config = {"method": run.method, "num_speculative_tokens": run.num_drafts}
        options["speculative_config"] = config | ({"model": run.draft} if run.draft else {})
        draft_config = str(folder.role(DRAFT).measure_config)
        options["additional_config"] = {ADDITIONAL_CONFIG_KEY: {"draft_quant_config": draft_config}}
    return LLM(**engine_options(options, run.engine))


def engine_options(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's options: the user's win, and `additional_config.gaudi_spec` of both is merged."""
    merged = {**defaults, **overrides}
    ours, theirs = (options.get("additional_config") for options in (defaults, overrides))
    if ours and theirs:
        spec = {**ours.get(ADDITIONAL_CONFIG_KEY, {}), **theirs.get(ADDITIONAL_CONFIG_KEY, {})}
        merged["additional_config"] = {**ours, **theirs, ADDITIONAL_CONFIG_KEY: spec}
    return merged


def _measure_longest(run: Run, prompts: Sequence[str]) -> int:
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(run.model)
    return min(run.max_prompt_tokens, max(len(tokenizer.encode(text)) for text in prompts))


def _chunks(prompts: Sequence[str], done: int, size: int) -> Iterator[Sequence[str]]:
    starts = range(done, len(prompts), size)
    chunks = (prompts[start : start + size] for start in starts)
    before = -(-done // size)
    return counted(chunks, f"measuring, chunks of {size} prompts", before + len(starts), before)


def _generate(llm: LLM, run: Run, prompts: Sequence[str]) -> None:
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(text)[: run.max_prompt_tokens] for text in prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=run.max_tokens, ignore_eos=True)
    llm.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)


def _merge_files(role: Role, world: int, model: str) -> None:
    """Merge the ranks' files into those of earlier runs; doing it twice changes nothing."""
    merged = {r.rank: r for r in files.read_world(role.measured, world)} if files.find_ranks(role.measured) else {}
    for record in files.read_world(role.raw, world):
        if record.rank in merged:
            files.check_same_model(merged[record.rank], replace(record, model=model), str(role.raw))
            record = merge(merged[record.rank], record)
        write_files(role.measured, replace(record, model=model))
