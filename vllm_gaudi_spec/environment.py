"""What the environment says. Nobody else in the package reads it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

from vllm_gaudi_spec.config import GAUDI2, GAUDIS, UnsupportedConfigError

DEVICE_VARIABLE = "VGS_DEVICE"


def requested_device() -> str | None:
    """The device named by VGS_DEVICE, or None when the choice is ours."""
    return os.environ.get(DEVICE_VARIABLE) or None


def skip_warmup() -> bool:
    return os.environ.get("VGS_SKIP_WARMUP", "0") not in ("", "0")


TRUST_DRAFT_CODE = "VGS_TRUST_DRAFT_CODE"


def trusts_draft_code() -> bool:
    """Whether `--trust-remote-code` holds for the drafter's folder as well."""
    return os.environ.get(TRUST_DRAFT_CODE, "0") not in ("", "0")


def environment_value(name: str) -> str | None:
    """As it stands, for what only shows it, or hands it on."""
    return os.environ.get(name)


def vllm_plugins_allowed() -> set[str] | None:
    """The plugins that VLLM_PLUGINS lets in; None means all."""
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else {name.strip() for name in names.split(",")}


_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_CHOSEN_BY = "VGS_START_METHOD_CHOSEN_BY"


def choose_start_method(choose: Callable[[], str]) -> None:
    """How vLLM starts its engine process: as the user said, else as `choose` says, asked anew for each engine of a
    process. Engine processes, which inherit the answer, do not ask."""
    chosen_by = os.environ.get(_CHOSEN_BY)
    if _START_METHOD in os.environ and chosen_by != str(os.getpid()):
        return
    os.environ[_START_METHOD] = choose()
    os.environ[_CHOSEN_BY] = str(os.getpid())


_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


def keep_engine_in_process(why: str) -> None:
    if os.environ.setdefault(_IN_PROCESS, "0") != "0":
        raise ValueError(f"{why} needs the engine in this process: unset {_IN_PROCESS} or set it to 0")


def keeps_engine_in_process() -> bool:
    return os.environ.get(_IN_PROCESS, "1") == "0"


def cache_folder() -> Path:
    """Where this project keeps what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "vllm_gaudi_spec"


def name_process_group(init_method: str) -> None:
    """vLLM's shared-memory collectives for the CPU find each other by this name. Ranks that do not share memory have
    other names: then vLLM takes gloo."""
    group = init_method.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    os.environ["VLLM_DIST_IDENT"] = f"{group}-{_shared_memory()}"


def _shared_memory() -> str:
    """The same in processes that see one /dev/shm, which those of two machines, or of two containers, do not."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started}-{os.stat('/dev/shm').st_dev}"
    except OSError:  # no Linux
        return platform.node()


def leave_threads_unbound() -> None:
    """vLLM binds each CPU rank to a NUMA node of its own, and does not start where there are fewer."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def environment_of_children(only: Path | None = None) -> dict[str, str]:
    """For a process that imports this package, and whose engine runs where its caller can reach it. `only`: for a
    Python of another environment, the one folder to add to what that has."""
    root = str(Path(__file__).parents[1])
    paths = str(only) if only else os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**os.environ, **quiet, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": paths}


# What a Gaudi process needs in its environment, unless the user says otherwise. Read by the bridge when it is imported.
_GAUDI_DEFAULTS = {
    # Lazy mode is the one whose programs are counted and proven; releases differ in what they do when it is unset.
    "PT_HPU_LAZY_MODE": "1",
    # Shared weights would be laid out anew for each graph that reads them.
    "PT_HPU_WEIGHT_SHARING": "0",
    # Without it a collective inside a graph ends in an error: tensor parallel steps have one in each layer.
    "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true",
    # vLLM would run shared experts on a stream of their own, which a graph does not capture.
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
}


def set_gaudi_defaults() -> None:
    for name, value in _GAUDI_DEFAULTS.items():
        os.environ.setdefault(name, value)


def gaudi_is_lazy() -> bool:
    """As the bridge reads it: 0 is eager and compiled, everything else is lazy."""
    set_gaudi_defaults()
    return os.environ["PT_HPU_LAZY_MODE"] != "0"


def gaudi_has_lazy_collectives() -> bool:
    set_gaudi_defaults()
    return os.environ["PT_HPU_ENABLE_LAZY_COLLECTIVES"].lower() in ("1", "true")


def gaudi_memory_reserve() -> float:
    """The share of free memory that is kept for captured graphs; under the name that Gaudi users know."""
    return float(os.environ.get("VLLM_GRAPH_RESERVED_MEM", "0.1"))


def emulated_generation() -> str:
    """The card that hpu-emulated takes after."""
    generation = os.environ.get("VGS_EMULATED_GENERATION", GAUDI2)
    if generation not in GAUDIS:
        raise UnsupportedConfigError(f"VGS_EMULATED_GENERATION={generation} is unknown; use {' or '.join(GAUDIS)}.")
    return generation


def quant_config_path() -> str | None:
    """The target's quantisation file, under the name that Gaudi users know."""
    return os.environ.get("QUANT_CONFIG") or None


def kv_cache_space_gib() -> int | None:
    """Upstream's older way to size the KV cache on a CPU."""
    value = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    return int(value) if value else None
