"""The environment variables that matter to this platform, and what each means: one table for `doctor` and the docs."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    default: str
    """What holds where it is not set, as words."""
    meaning: str


VARIABLES = (
    Variable(
        "VGS_DEVICE",
        "a Gaudi, else an NPU, else the CPU",
        "the device: cpu, hpu, hpu-emulated, ascend, ascend-emulated or cuda",
    ),
    Variable("VGS_SKIP_WARMUP", "0", "1 makes graphs while serving instead of before: for trying things out only"),
    Variable("VGS_EMULATED_GENERATION", "gaudi2", "the card that hpu-emulated takes after: gaudi2 or gaudi3"),
    Variable("VGS_TRUST_DRAFT_CODE", "0", "1 lets --trust-remote-code hold for the drafter's folder as well"),
    Variable("VLLM_PLUGINS", "all", "which plugins vLLM loads; gaudi_spec has to be among them"),
    Variable("VLLM_TARGET_DEVICE", "not asked for", "cpu makes vLLM take its own CPU platform and ask no plugin"),
    Variable("PT_HPU_LAZY_MODE", "1", "on a Gaudi, real or emulated: 0 runs eagerly and compiled, 1 records graphs"),
    Variable("PT_HPU_WEIGHT_SHARING", "0", "on a Gaudi: 1 lays weights out anew for each graph that reads them"),
    Variable("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true", "on a Gaudi: tensor parallel steps need it in lazy mode"),
    Variable("VLLM_GRAPH_RESERVED_MEM", "0.1", "on a Gaudi: the share of free memory that is kept for graphs"),
    Variable("HABANA_VISIBLE_DEVICES", "all", "in a container: which Gaudis it sees"),
    Variable("HABANA_VISIBLE_MODULES", "all", "which Gaudis this process may open, by module"),
    Variable("ASCEND_RT_VISIBLE_DEVICES", "all", "which NPUs this process may open"),
    Variable("CUDA_VISIBLE_DEVICES", "all", "which GPUs this process may open"),
    Variable("QUANT_CONFIG", "none", "the target's quantisation file, which measures or quantises"),
    Variable("VLLM_CPU_KVCACHE_SPACE", "half of what is free, 4 at most", "on a CPU: GiB for the KV cache"),
    Variable("VLLM_CPU_OMP_THREADS_BIND", "auto", "on a CPU: the cores that each rank's threads are bound to"),
    Variable("OMP_NUM_THREADS", "all cores", "on a CPU: the threads that share a step"),
    Variable("LD_PRELOAD", "none", "on a CPU: libiomp5.so here keeps steps fast beside other work"),
    Variable("KMP_BLOCKTIME", "200", "with Intel's OpenMP: milliseconds that a waiting thread spins; 1 is fair"),
    Variable("VLLM_WORKER_MULTIPROC_METHOD", "chosen by a test", "how the engine process starts: fork or spawn"),
    Variable("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "0 runs the engine in the caller's process"),
    Variable("VLLM_LOGGING_LEVEL", "INFO", "how much vLLM and this platform say"),
    Variable("HF_HUB_OFFLINE", "0", "1 takes models from folders and the cache only, and downloads nothing"),
    Variable("HF_HOME", "~/.cache/huggingface", "where downloaded models lie"),
    Variable("XDG_CACHE_HOME", "~/.cache", "where the demo model and vocabulary maps are kept"),
)
