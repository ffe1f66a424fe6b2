"""Checks whether a model or a pair of models can be served: rejected options, vocabularies, lengths, and memory.

vLLM is loaded, but weights are not: their sizes come from file headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from vllm_gaudi_spec.config import (
    FLOAT16,
    FLOAT32,
    FP8_KV,
    LM_HEAD_QUANTIZATION,
    Options,
    Speculation,
    UnsupportedConfigError,
    format_size,
    in_one_line,
)
from vllm_gaudi_spec.device_table import DEVICES, load_backend
from vllm_gaudi_spec.devices.common import host_memory
from vllm_gaudi_spec.drafting.memory import NO_ROOM_FOR_KV, KVBlock, compute_drafting_bytes
from vllm_gaudi_spec.drafting.universal.pairs import Pair, require_same_vocabulary
from vllm_gaudi_spec.methods import METHODS, has_model
from vllm_gaudi_spec.quantization.config import get_cpu_weights
from vllm_gaudi_spec.quantization.fingerprint import find_model_folder
from vllm_gaudi_spec.recurrent.table import describe_snapshots, describe_states, num_pending, num_snapshots
from vllm_gaudi_spec.refusals.files import find_weight_files
from vllm_gaudi_spec.runner.row_memory import count_row_bytes
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.tools.doctor.findings import Finding, note, ok, problem, refusal, warning
from vllm_gaudi_spec.tools.doctor.layers import num_layers_with_kv, state_bytes
from vllm_gaudi_spec.tools.io.prompts import load_prompts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def check_pair(options: dict[str, Any]) -> Iterator[Finding]:
    try:
        vllm_config = configure(options)
    except Exception as error:  # rejected or not found by vLLM, transformers, or this platform
        yield refusal("models", in_one_line(error))
        return
    speculation = Speculation.from_vllm(vllm_config)
    yield ok("models", _describe(vllm_config, speculation))
    if speculation is not None and speculation.method == "draft_model":
        yield from _check_vocabularies(vllm_config, speculation)
    yield _check_lengths(vllm_config, speculation)
    yield _check_memory(vllm_config, speculation)


def configure(options: dict[str, Any]) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_gaudi_spec.upstream.tools import UsageContext

    arguments = {name: value for name, value in options.items() if value is not None}
    # Use the server's context, because its default batches are larger than those of other contexts.
    return EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


def _describe(vllm_config: VllmConfig, speculation: Speculation | None) -> str:
    model = vllm_config.model_config
    text = f"{model.architectures[0]} in {str(model.dtype).removeprefix('torch.')}"
    if model.quantization is not None:
        text += f" with weights in {model.quantization}"
    if speculation is None:
        return f"{text}, without speculation, is accepted"
    method = "universal_draft" if speculation.universal else speculation.method
    return f"{text}, with {method}, k = {speculation.num_drafts}, is accepted"


# ---- vocabularies ----------------------------------------------------------------------------------------


_ENOUGH = 0.8
"""Minimum fraction of the tokens in a text that the drafter should have.

A draft ends at the first token without a match, so 0.8 limits the mean acceptance length to less than five.
"""


def _check_vocabularies(vllm_config: VllmConfig, speculation: Speculation) -> Iterator[Finding]:
    try:
        if not speculation.universal:
            require_same_vocabulary(vllm_config)
            yield ok("vocabulary", "the drafter has the target's vocabulary")
            return
        pair = Pair.load(vllm_config)
    except UnsupportedConfigError as error:
        yield refusal("vocabulary", in_one_line(error))
        return
    matched = pair.map.target_to_draft >= 0
    ids = [token for text in load_prompts() for token in pair.target.tokenizer.encode(text, add_special_tokens=False)]
    share = float(matched[ids].mean())
    text = (
        f"{pair.map.num_matched} tokens in common, {100 * matched.mean():.0f} % of the target's and "
        f"{100 * pair.map.num_matched / len(pair.map.draft_to_target):.0f} % of the drafter's; "
        f"{100 * share:.0f} % of the tokens in ordinary text"
    )
    if share >= _ENOUGH:
        yield ok("vocabulary", text)
        return
    remedy = (
        "set universal_context retokenize and universal_match slem in additional_config.gaudi_spec, "
        "or use another drafter"
    )
    yield (note if speculation.retokenizes else warning)("vocabulary", text, remedy)


# ---- lengths ---------------------------------------------------------------------------------------------


def _check_lengths(vllm_config: VllmConfig, speculation: Speculation | None) -> Finding:
    longest = vllm_config.model_config.max_model_len
    drafter_len = speculation.drafter_max_len if speculation is not None else None
    if speculation is not None and speculation.retokenizes:
        drafter_len = speculation.universal_kv_len
    text = f"requests of up to {longest} tokens"
    if drafter_len is None or drafter_len >= longest:
        return ok("lengths", text + (", with drafts to the end" if drafter_len else ""))
    return note(
        "lengths",
        f"{text}; after {drafter_len} tokens of the drafter, they continue without drafts",
        "expect no speedup after that, or use a drafter with a longer context",
    )


# ---- memory ----------------------------------------------------------------------------------------------


def _check_memory(vllm_config: VllmConfig, speculation: Speculation | None) -> Finding:
    model, spec_config = vllm_config.model_config, vllm_config.speculative_config
    drafter = None
    if spec_config is not None and has_model(spec_config.method):
        drafter = spec_config.draft_model_config
    # With mtp, the drafter is in the target's files.
    models = [model] if drafter is None or drafter.model == model.model else [model, drafter]
    sizes = {one.model: estimate_weights(vllm_config, one) for one in models}
    if missing := [name for name, size in sizes.items() if not size]:
        return note(
            "memory", f"the weights of {' and '.join(missing)} are not on this machine, so their size is unknown"
        )
    weights = sum(sizes.values())
    others = estimate_drafting(vllm_config, speculation, drafter) | estimate_states(vllm_config, speculation)
    per_token = count_token_bytes(vllm_config, speculation)
    kib = f"{per_token / 1024:.1f}".removesuffix(".0")
    text = ", ".join(f"{format_size(size)} for {name}" for name, size in ({"weights": weights} | others).items())
    rows = sum(estimate_rows(vllm_config, speculation, drafter).values())
    cache = _find_room_for_kv(vllm_config, weights, sum(others.values()) + rows)
    if cache is None:
        return note("memory", f"{text}, and {kib} KiB of KV per token, of the card's memory")
    if cache <= 0 < sum(others.values()):
        return refusal("memory", f"{text}: {NO_ROOM_FOR_KV}")
    if not per_token:
        return ok("memory", f"{text}; there is no KV")
    tokens, longest = max(cache, 0) // per_token, model.max_model_len
    text += f"; the KV cache gets {format_size(max(cache, 0))}, room for {tokens} tokens at {kib} KiB"
    if tokens < longest:
        shorter = f"set --max-model-len to {tokens} or less, " if tokens else "set "
        remedy = f"{shorter}--kv-cache-memory-bytes to more, or use smaller models"
        return problem("memory", f"{text}, but one request may have {longest}", remedy)
    return ok("memory", f"{text}: concurrency {tokens // longest} at {longest} tokens per request, more if shorter")


# Maps `cpu_weights` to the number of bytes per weight on a CPU in float32. By default, matrices also have a
# half-precision copy if the copy is exact.
_CPU_BYTES = {None: 6, FLOAT32: 4, FLOAT16: 2}


def estimate_weights(vllm_config: VllmConfig, model: ModelConfig) -> int:
    """Return the approximate size in bytes of a rank's weights, or 0 if there are no files."""
    folder, width = find_model_folder(model.model), model.dtype.itemsize
    if load_backend().traits.takes_cpu_weights and width == 4:
        width = _CPU_BYTES[get_cpu_weights(vllm_config)]
    read = find_weight_files(folder, str(vllm_config.load_config.load_format)) if folder is not None else None
    if folder is None or read is None:
        return 0
    return count_elements(folder, read[0]) * width // vllm_config.parallel_config.tensor_parallel_size


def count_elements(folder: Path, files: str) -> int:
    """Return the number of elements in a model's tensors, according to the headers of its files."""
    number = 0
    for path in folder.glob(files):
        try:
            with safe_open(path, "np") as file:
                number += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy the model again or use another") from None
    return number


def estimate_drafting(
    vllm_config: VllmConfig, speculation: Speculation | None, drafter: ModelConfig | None
) -> dict[str, int]:
    """Return the memory that drafting needs in addition to weights and the KV cache."""
    if speculation is None or drafter is None:
        return {}
    rows, vocabulary = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.get_vocab_size()
    size = vllm_config.cache_config.block_size
    kv_region_block = KVBlock(size, size * count_kv_bytes(drafter, vllm_config)) if speculation.retokenizes else None
    found = compute_drafting_bytes(speculation, rows, vocabulary, kv_region_block)
    if getattr(vllm_config.speculative_config, LM_HEAD_QUANTIZATION, None) is not None:
        drafted = getattr(drafter.hf_config, "draft_vocab_size", None) or drafter.get_vocab_size()
        ranks = vllm_config.speculative_config.draft_parallel_config.tensor_parallel_size
        found["the drafter's output matrix in FP8"] = drafted * drafter.get_hidden_size() // ranks
    return found


def estimate_rows(
    vllm_config: VllmConfig, speculation: Speculation | None, drafter: ModelConfig | None
) -> dict[str, int]:
    """Return the memory that each request needs in addition to KV and recurrent states."""
    options, model = Options.from_vllm(vllm_config), vllm_config.model_config
    shapes = Shapes.from_config(vllm_config, options, load_backend(), speculation.widths if speculation else ())
    reads_layers = speculation is not None and METHODS[speculation.method].reads_layers
    carried_size = drafter.get_hidden_size() if drafter is not None and reads_layers else None
    num_drafts = speculation.num_drafts if speculation else 0
    return count_row_bytes(vllm_config, shapes, num_drafts, (model.get_hidden_size(), model.dtype), carried_size)


def estimate_states(vllm_config: VllmConfig, speculation: Speculation | None) -> dict[str, int]:
    """Return the memory for the states of recurrent layers."""
    rows = vllm_config.scheduler_config.max_num_seqs
    slots = num_snapshots(vllm_config, Options.from_vllm(vllm_config).state_snapshots)
    pending = num_pending(speculation.num_drafts if speculation else 0)
    sizes = {describe_states(rows): rows + 1, describe_snapshots(slots): slots}
    found = {name: state_bytes(vllm_config, count, pending) for name, count in sizes.items()}
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def count_token_bytes(vllm_config: VllmConfig, speculation: Speculation | None) -> int:
    """Return the number of bytes per token in a rank's KV cache, including those of a drafter that has its own KV."""
    num_bytes, spec_config = count_kv_bytes(vllm_config.model_config, vllm_config), vllm_config.speculative_config
    if spec_config is None or speculation is None or speculation.retokenizes:
        return num_bytes
    if not METHODS[speculation.method].has_kv or spec_config.use_gemma4_mtp():  # assistant models read the target's KV
        return num_bytes
    return num_bytes + count_kv_bytes(spec_config.draft_model_config, vllm_config)


def count_kv_bytes(model: ModelConfig, vllm_config: VllmConfig) -> int:
    """Return the number of bytes of KV per token on a rank, in all layers with attention.

    Latent attention stores one vector instead of a key and a value.
    """
    parallel = vllm_config.parallel_config
    if not (num_layers := num_layers_with_kv(model, parallel)):
        return 0
    vectors = model.get_num_kv_heads(parallel) * (1 if model.use_mla else 2)
    width = 1 if vllm_config.cache_config.cache_dtype == FP8_KV else model.dtype.itemsize
    return int(num_layers * vectors * model.get_head_size() * width)


def _find_room_for_kv(vllm_config: VllmConfig, weights: int, others: int) -> int | None:
    """Return the number of bytes that a rank's worker would use for KV, or None if it is unknown.

    Only the host's memory is known, because reading the memory of a card requires opening the card.
    """
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return int(cache.kv_cache_memory_bytes)
    if not DEVICES[load_backend().traits.name].computes_on_host:
        return None
    ranks = vllm_config.parallel_config.local_world_size
    return host_memory.choose_kv_bytes(cache.gpu_memory_utilization, less=ranks * weights) // ranks - others
