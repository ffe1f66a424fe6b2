"""Models of a given size with random weights, and the engine that runs them in this process.

Speed depends on shapes rather than on trained weights, so a folder with a config.json is enough for vLLM's `dummy`
loader. VGS_DEVICE selects the device.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.shared import common

SIZES: dict[str, dict[str, int]] = {
    "8b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
    ),
    "1.5b": dict(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=8960,
        vocab_size=128256,
    ),
    "0.5b": dict(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=4864,
        vocab_size=128256,
    ),
    "small": dict(
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        vocab_size=65536,
    ),
    "tiny": dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=512,
    ),
    "tiny-draft": dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        vocab_size=512,
    ),
}
DRAFTERS = {"8b": "0.5b", "1.5b": "0.5b", "tiny": "tiny-draft"}
DTYPES = {"8b": torch.bfloat16, "1.5b": torch.bfloat16, "small": torch.bfloat16, "tiny": torch.float32}
# Bytes per second, according to vendors' datasheets.
DATASHEET_BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
MAX_LEN = 32768


def write_model(folder: Path, size: str, words: Iterable[str] = (), **changes: Any) -> str:
    """Write a Llama of the given size in a folder from which vLLM can load it, and return the folder. `words` are the
    tokens of its tokenizer from ID 3 on."""
    from tokenizers import Tokenizer, decoders, models

    made = folder / size
    made.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **SIZES[size],
        **changes,
    }
    (made / "config.json").write_text(json.dumps(config))
    vocab = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()  # universal drafting reads from it which bytes a token represents
    tokenizer.save(str(made / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return str(made)


def weight_bytes(shape: dict[str, int], dtype: torch.dtype) -> int:
    """Return the number of bytes of weights that a step reads: all but the embedding table, which is read by row."""
    hidden, heads, kv = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    size = shape["head_dim"]
    layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    return dtype.itemsize * (shape["num_hidden_layers"] * layer + hidden + hidden * shape["vocab_size"])


def kv_bytes(shape: dict[str, int], dtype: torch.dtype) -> int:
    """Return the number of bytes of KV per token, summed over all layers."""
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * dtype.itemsize


def rates_of(rate: float, k: int) -> list[float]:
    """Return the probabilities that the first 1, 2, ... k drafts are all accepted."""
    return [rate ** (i + 1) for i in range(k)]


# ---- the engine ----------------------------------------------------------------------------------------


def keep_engine_here() -> None:
    """Run engines in this process, so that their runner can be accessed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@contextmanager
def engine(size: str, speculative_config: dict[str, Any] | None, drafter: str | None = None, **options: Any) -> Any:
    """Return an `LLM` with a model of the given size. `drafter` is the size of the draft model, for methods that use
    one. Options such as buckets are passed as `gaudi_spec`."""
    from benchmarks.shared import drafting

    keep_engine_here()
    spec_options = options.pop("gaudi_spec", {})
    with tempfile.TemporaryDirectory() as folder:
        target = write_model(Path(folder), size)
        if speculative_config is not None and drafter is not None:
            draft = write_model(Path(folder), drafter)
            speculative_config = speculative_config | {"model": draft}
        defaults: dict[str, Any] = dict(
            load_format="dummy",
            dtype=DTYPES[size],
            additional_config={"gaudi_spec": spec_options},
        )
        with drafting.engine(target, speculative_config, **(defaults | options)) as llm:
            yield llm


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def fill_kv(llm: Any) -> None:
    """Fill the KV cache with random values, because multiplying zeros takes less time than multiplying real values."""
    seen = set()
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        for tensor in _tensors(layer.kv_cache):
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.normal_()


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        yield cache
    else:
        for part in (cache.keys, cache.values) if hasattr(cache, "values") else cache:
            yield from _tensors(part) if part is not None else ()


# ---- time ----------------------------------------------------------------------------------------------


def on_accelerator() -> bool:
    return os.environ.get("VGS_DEVICE") == "cuda"


def seconds_of(
    work: Callable[[], Any],
    before: Callable[[], Any],
    repeats: int,
    synchronize: Callable[[], Any] = lambda: None,
) -> float:
    """Return the median time of `work` over several runs. Before each run, `before` is called without being timed.

    On a GPU, this is the device's own time, measured with events, which never waits for the host. On other devices, it
    is measured with the host's clock, and `synchronize` waits for the device.
    """
    work()
    if not on_accelerator():
        times = []
        for _ in range(repeats):
            before()
            synchronize()
            started = time.perf_counter()
            work()
            synchronize()
            times.append(time.perf_counter() - started)
        return median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    # Keep the device busy while the host runs ahead.
    torch.cuda._sleep(20_000_000)
    for begin, end in events:
        before()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in events) / 1e3


def bandwidth() -> dict[str, float]:
    """Return the bandwidth in bytes per second, both measured and, if available, from the datasheet. On an accelerator,
    a large copy is measured, counting bytes read and written; on a CPU, reads by all threads are measured."""
    if not on_accelerator():
        return {"measured": common.read_bandwidth(3)}
    measured = {"measured": _copy_rate()}
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    return measured | ({"datasheet": DATASHEET_BANDWIDTH[name]} if name in DATASHEET_BANDWIDTH else {})


def _copy_rate() -> float:
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), lambda: None, 20)


def describe_machine() -> dict[str, Any]:
    import vllm

    facts = common.describe_machine() | {"device": os.environ.get("VGS_DEVICE", "cpu"), "vllm": vllm.__version__}
    if on_accelerator():
        facts |= {"accelerator": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def name_device() -> str:
    """Return the name of the card or processor, and the number of the processor's cores."""
    if on_accelerator():
        return f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties().multi_processor_count} cores"
    machine = common.describe_machine()
    return f"{machine['cpu']}, {machine['threads']} cores"
