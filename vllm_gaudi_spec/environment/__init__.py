"""Environment variables. No other module in the package reads the environment.

`gaudi-spec doctor` prints the `VARIABLES` table, which is also the source of docs/reference/options.md.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vllm_gaudi_spec.config import GAUDI2, GAUDIS, UnsupportedConfigError


class Variable(NamedTuple):
    name: str
    default: str
    """The value if the variable is not set, or a description of that value."""
    meaning: str

    @property
    def value(self) -> str | None:
        """Return the value, or None if the variable is unset or empty."""
        return os.environ.get(self.name) or None

    @property
    def value_or_default(self) -> str:
        """Return the value, or the default if the variable is unset or empty. The default must be an actual value."""
        return self.value or self.default

    @property
    def is_on(self) -> bool:
        return self.value_or_default != "0"

    def choose(self, *values: str) -> str:
        """Return the value or the default, which must be one of `values`."""
        found = self.value_or_default
        if found not in values:
            raise UnsupportedConfigError(f"{self.name}={found} is unknown; use {' or '.join(values)}.")
        return found

    def parse_integer(self, least: int) -> int:
        """Return the value or the default, which must be an integer of at least `least`."""
        value = self.value_or_default
        if not value.isdecimal() or int(value) < least:
            raise UnsupportedConfigError(f"{self.name} must be an integer of {least} or more, got {value}.")
        return int(value)


DEVICE = Variable(
    "VGS_DEVICE", "the first Gaudi or NPU found, else cpu", "the device, such as hpu or cuda; errors list all names"
)
SKIP_WARMUP = Variable(
    "VGS_SKIP_WARMUP", "0", "1 compiles graphs while serving instead of before, for experiments only"
)
VENDORS_SKIP_WARMUP = Variable(
    "VLLM_SKIP_WARMUP", "false", "vllm-gaudi's name for VGS_SKIP_WARMUP, which takes precedence; true skips warm-up"
)
SELF_TEST = Variable("VGS_SELF_TEST", "1", "0 skips the self-test of an accelerator before its model is loaded")
EMULATED_GENERATION = Variable(
    "VGS_EMULATED_GENERATION", GAUDI2, "the card that hpu-emulated emulates: gaudi2 or gaudi3"
)
EMULATOR = Variable(
    "VGS_EMULATOR", "hostile", "kind lets hpu-emulated accept operations that fail only on some cards or releases"
)
TORCH_NPU = Variable(
    "VGS_TORCH_NPU",
    "torch-npu in the Python environment",
    "the folder with Huawei's torch_npu, which ascend-emulated runs over an emulated CANN",
)
TRUST_DRAFT_CODE = Variable("VGS_TRUST_DRAFT_CODE", "0", "1 also applies --trust-remote-code to the drafter's folder")
PLUGINS = Variable("VLLM_PLUGINS", "all", "which plugins vLLM loads; must include gaudi_spec")
TARGET_DEVICE = Variable("VLLM_TARGET_DEVICE", "not used", "cpu selects vLLM's own CPU platform, without plugins")
LAZY_MODE = Variable(
    "PT_HPU_LAZY_MODE",
    "1 where torch has lazy mode, else 0",
    "on a Gaudi, real or emulated: 1 selects lazy mode, 0 compiled mode",
)
WEIGHT_SHARING = Variable(
    "PT_HPU_WEIGHT_SHARING", "0", "on a Gaudi: 1 lays weights out again for each graph that reads them"
)
LAZY_COLLECTIVES = Variable(
    "PT_HPU_ENABLE_LAZY_COLLECTIVES", "true", "on a Gaudi: required for tensor parallelism in lazy mode"
)
PARALLEL_COMPILATION = Variable(
    "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS", "1", "on a Gaudi: 1 compiles several graphs at once"
)
INPUT_REUSE = Variable(
    "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE",
    "0 in compiled mode",
    "on a Gaudi: 1 lets a recipe reuse the memory of the input that it reads last",
)
GRAPH_MEMORY = Variable(
    "VLLM_GRAPH_RESERVED_MEM", "0.1", "on a Gaudi: the fraction of free memory that is reserved for graphs"
)
LAYERS_OF_A_RECIPE = Variable(
    "VLLM_CONFIG_HIDDEN_LAYERS",
    "1",
    "on a Gaudi: the number of decoder layers that are compiled together; 0 for all of them",
)
ROW_PARALLEL_CHUNKS = Variable(
    "VLLM_ROW_PARALLEL_CHUNKS",
    "1",
    "on several Gaudis in lazy mode: the number of chunks into which row-parallel layers split long prompts",
)
ROW_PARALLEL_CHUNK_THRESHOLD = Variable(
    "VLLM_ROW_PARALLEL_CHUNK_THRESHOLD",
    "8192",
    "on a Gaudi: the minimum number of tokens for VLLM_ROW_PARALLEL_CHUNKS to have an effect",
)
VISIBLE_GAUDIS = Variable("HABANA_VISIBLE_DEVICES", "all", "in a container: the Gaudis that it sees")
VISIBLE_MODULES = Variable("HABANA_VISIBLE_MODULES", "all", "which Gaudis this process may open, by module")
VISIBLE_NPUS = Variable("ASCEND_RT_VISIBLE_DEVICES", "all", "which NPUs this process may open")
TASK_QUEUE = Variable(
    "TASK_QUEUE_ENABLE", "1", "on an NPU: 2 is not supported, because torch_npu then cannot capture graphs"
)
NPU_ALLOCATOR = Variable(
    "PYTORCH_NPU_ALLOC_CONF",
    "none",
    "on an NPU: pin_memory_expandable_segments is not supported, because graphs then cannot be captured",
)
LAUNCH_BLOCKING = Variable(
    "ASCEND_LAUNCH_BLOCKING", "0", "on an NPU: 1 is not supported, because graphs then cannot be captured"
)
PROMPT_MASKS = Variable(
    "VGS_NPU_PROMPT_MASKS",
    "compressed",
    "on an NPU: the masks of attention for prompts, compressed or dense",
)
HCCL_EXPANSION = Variable(
    "HCCL_OP_EXPANSION_MODE",
    "chosen by HCCL",
    "on several NPUs: AIV is not supported, because captures failed or hung with it",
)
CANN_HOME = Variable("ASCEND_HOME_PATH", "none", "on an NPU: the folder of CANN, set by its set_env.sh")
VISIBLE_GPUS = Variable("CUDA_VISIBLE_DEVICES", "all", "which GPUs this process may open")
QUANT_CONFIG = Variable("QUANT_CONFIG", "none", "the target's quantization file, for measuring or quantizing")
KV_CACHE_SPACE = Variable(
    "VLLM_CPU_KVCACHE_SPACE", "half of the free memory, at most 4", "on a CPU: GiB for the KV cache"
)
THREADS_BIND = Variable(
    "VLLM_CPU_OMP_THREADS_BIND", "auto", "on a CPU: the cores that each rank's threads are bound to"
)
NUM_THREADS = Variable("OMP_NUM_THREADS", "all cores", "on a CPU: the threads that share a step")
PRELOADED = Variable(
    "LD_PRELOAD",
    "Intel's OpenMP, if installed",
    "on a CPU: the engine process's OpenMP library; with libiomp5.so, steps stay fast while other programs run",
)
BLOCKTIME = Variable("KMP_BLOCKTIME", "1", "with Intel's OpenMP: milliseconds that a waiting thread spins")
START_METHOD = Variable(
    "VLLM_WORKER_MULTIPROC_METHOD", "chosen by a test", "how the engine process starts: fork or spawn"
)
ENGINE_PROCESS = Variable("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "0 runs the engine in the caller's process")
LOGGING_LEVEL = Variable("VLLM_LOGGING_LEVEL", "INFO", "the log level of vLLM and of this platform")
HUB_OFFLINE = Variable("HF_HUB_OFFLINE", "0", "1 takes models from folders and the cache only, and downloads nothing")
HUB_HOME = Variable("HF_HOME", "~/.cache/huggingface", "where downloaded models are stored")
CACHE_HOME = Variable("XDG_CACHE_HOME", "~/.cache", "where cached files, such as the demo model, are stored")
VARIABLES = tuple(value for value in globals().copy().values() if isinstance(value, Variable))
"""The documented variables: all variables above, in order."""
# Not in the table, because `doctor` prints the values of variables in the table.
API_KEY = Variable("OPENAI_API_KEY", "none", "sent to servers by gaudi-spec chat")


def skip_warmup() -> bool:
    """Whether the user disables warm-up with our variable or, if it is not set, with vllm-gaudi's variable."""
    if SKIP_WARMUP.value:
        return SKIP_WARMUP.is_on
    return VENDORS_SKIP_WARMUP.value_or_default.lower() in ("true", "t", "1", "yes", "y", "on")


def compresses_prompt_masks() -> bool:
    """Whether prompt attention on an NPU uses a compressed mask."""
    return PROMPT_MASKS.choose("compressed", "dense") == "compressed"


def is_set(name: str) -> bool:
    """Whether a variable is set, even if it is not in the table."""
    return name in os.environ


def list_set_variables() -> dict[Variable, str]:
    """Return the variables in the table that are set, and their values."""
    return {variable: os.environ[variable.name] for variable in VARIABLES if is_set(variable.name)}


def list_all_variables() -> dict[str, str]:
    """Return every environment variable of this process, including secrets."""
    return dict(os.environ)


def list_allowed_plugins() -> set[str] | None:
    """Return the plugins that VLLM_PLUGINS allows, or None if it allows all of them."""
    names = os.environ.get(PLUGINS.name)  # an empty value allows no plugins
    return None if names is None else {name.strip() for name in names.split(",")}


_CHOSEN_BY = "VGS_START_METHOD_CHOSEN_BY"


def choose_start_method(choose: Callable[[], str]) -> None:
    """Set vLLM's start method for engine processes to the result of `choose`, unless the user has set it.

    `choose` is called once for each engine that a process creates. Engine processes inherit the setting.
    """
    chosen_by = os.environ.get(_CHOSEN_BY)
    if is_set(START_METHOD.name) and chosen_by != str(os.getpid()):
        return
    os.environ[START_METHOD.name] = choose()
    os.environ[_CHOSEN_BY] = str(os.getpid())


OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"
"""Where the intel-openmp package installs Intel's OpenMP library."""


def preload_openmp() -> None:
    """Make new processes load Intel's OpenMP if it is installed and they do not already preload an OpenMP library.

    Unlike GNU's library, Intel's lets waiting threads sleep (here, after 1 ms), which is faster on a busy machine.
    """
    preloaded = PRELOADED.value or ""
    if OPENMP.exists() and not any(name in preloaded for name in ("libiomp", "libomp", "libgomp")):
        os.environ[PRELOADED.name] = ":".join(filter(None, (preloaded, str(OPENMP))))
        os.environ.setdefault(BLOCKTIME.name, "1")


def keep_engine_in_process(why: str) -> None:
    """Make vLLM run its engine in this process, or raise ValueError if the user has ruled that out."""
    if os.environ.setdefault(ENGINE_PROCESS.name, "0") != "0":
        raise ValueError(f"{why} needs the engine in this process; unset {ENGINE_PROCESS.name} or set it to 0")


def keeps_engine_in_process() -> bool:
    return ENGINE_PROCESS.value == "0"


def cache_folder() -> Path:
    """Return the folder for this plugin's cached files."""
    base = CACHE_HOME.value or ""
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "vllm_gaudi_spec"


def name_process_group(init_method: str) -> None:
    """Set the name by which processes find each other for vLLM's CPU collectives over shared memory.

    Ranks that do not share memory get different names, which makes vLLM use gloo between them.
    """
    group = init_method.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    os.environ["VLLM_DIST_IDENT"] = f"{group}-{_identify_shared_memory()}"


def set_host_address(address: str) -> None:
    """Set the address at which vLLM listens, unless the user chose one."""
    if not os.environ.get("VLLM_HOST_IP"):
        os.environ["VLLM_HOST_IP"] = address


def _identify_shared_memory() -> str:
    """Return a name that two processes have in common if and only if they have the same /dev/shm."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started}-{os.stat('/dev/shm').st_dev}"
    except OSError:  # not Linux
        return platform.node()


def leave_threads_unbound() -> None:
    """Disable thread binding unless the user has set it, because vLLM fails to bind ranks to too few NUMA nodes."""
    os.environ.setdefault(THREADS_BIND.name, "nobind")


# Our defaults for variables read by the Gaudi bridge, its compiler, and vLLM.
_GAUDI_DEFAULTS = {
    # With weight sharing, weight layouts would be converted again for every graph that reads the weights.
    WEIGHT_SHARING.name: WEIGHT_SHARING.default,
    # Without this setting, collectives in graphs fail. Every layer of a tensor-parallel step contains some.
    LAZY_COLLECTIVES.name: LAZY_COLLECTIVES.default,
    # Otherwise, vLLM would run shared experts on a separate stream, which graphs do not capture.
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
    # Compiling a large model's graphs one at a time took hours instead of minutes (quirk S09).
    PARALLEL_COMPILATION.name: PARALLEL_COMPILATION.default,
}


def set_gaudi_defaults() -> None:
    """Set our defaults for Gaudi variables that the user has not set."""
    for name, value in _GAUDI_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # If the variable is not set, the bridge's release determines the mode.
    os.environ.setdefault(LAZY_MODE.name, "1" if gaudi_has_lazy_mode() else "0")
    if os.environ[LAZY_MODE.name] == "0":
        # An operation that runs outside a compiled region splits the region into several recipes. The last recipe that
        # reads a KV cache or a recurrent state would treat its memory as free, although the next step reads it.
        # vllm-gaudi sets this variable for models with recurrent states, whose results were wrong without it (pull
        # request 1753). In this plugin, caches are also updated in place.
        os.environ.setdefault(INPUT_REUSE.name, "0")


def gaudi_is_lazy() -> bool:
    """Whether the bridge runs in lazy mode. PT_HPU_LAZY_MODE=0 selects compiled mode, and other values lazy mode."""
    set_gaudi_defaults()
    return os.environ[LAZY_MODE.name] != "0"


def gaudi_has_lazy_mode() -> bool:
    """Whether the installed torch supports lazy mode.

    In lazy mode, the bridge does not load with stock torch, which it recognizes by version (see release 1.24,
    habana_frameworks/torch/__init__.py). After torch has loaded the bridge, the mode cannot change.
    """
    if (bridge := sys.modules.get("habana_frameworks.torch.utils.internal")) is not None:
        is_lazy: bool = bridge.is_lazy()
        return is_lazy
    return DEVICE.value == "hpu-emulated" or version("torch").partition("+")[2].startswith(("git", "hpu"))


def gaudi_has_lazy_collectives() -> bool:
    set_gaudi_defaults()
    return os.environ[LAZY_COLLECTIVES.name].lower() in ("1", "true")


def gaudi_memory_reserve() -> float:
    """Return the fraction of free memory to reserve for captured graphs, from vllm-gaudi's variable."""
    value = GRAPH_MEMORY.value_or_default
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UnsupportedConfigError(f"{GRAPH_MEMORY.name} must be at least 0 and less than 1, got {value}.")
    return share


def gaudi_layers_of_a_recipe() -> int:
    """Return the number of decoder layers per recipe from vllm-gaudi's variable, or 0 for all layers."""
    return LAYERS_OF_A_RECIPE.parse_integer(0)


def gaudi_chunks() -> tuple[int, int]:
    """Return the number of chunks for long prompts, and the minimum prompt length, from vllm-gaudi's variables."""
    num_chunks = ROW_PARALLEL_CHUNKS.parse_integer(1)
    if num_chunks > 1 and not gaudi_is_lazy():
        reason = "compiled mode waits for each collective"
        raise UnsupportedConfigError(
            f"{ROW_PARALLEL_CHUNKS.name}={num_chunks} has no effect, because {reason}; unset it."
        )
    return num_chunks, ROW_PARALLEL_CHUNK_THRESHOLD.parse_integer(1)


def emulated_generation() -> str:
    return EMULATED_GENERATION.choose(*GAUDIS)


def emulated_modules() -> tuple[int, ...]:
    """Return the indices of the Gaudis that this process may open, or an empty tuple if it may open all of them."""
    names = VISIBLE_MODULES.value_or_default
    return () if names == "all" else tuple(map(int, names.split(",")))


def emulator_is_hostile() -> bool:
    """Whether the emulated Gaudi rejects all operations that are known to fail on some cards or releases."""
    return EMULATOR.choose("hostile", "kind") == "hostile"


NPU_SETTINGS = (TASK_QUEUE, NPU_ALLOCATOR, LAUNCH_BLOCKING)


def list_npu_variables() -> dict[str, str]:
    """Return the torch_npu variables that affect whether graphs can be captured, if they are set."""
    return {variable.name: variable.value for variable in NPU_SETTINGS if variable.value is not None}


def hccl_expands_on_vector_cores() -> bool:
    """Whether HCCL runs collectives on vector cores."""
    return (HCCL_EXPANSION.value or "").upper() == "AIV"


def torch_npu_folder() -> Path:
    """Return the folder with Huawei's torch_npu for the emulated NPU.

    The folder is separate from other packages, because `import torch` loads an installed torch_npu and fails without
    CANN. On a machine with an NPU, the installed package is used.
    """
    if TORCH_NPU.value:
        return Path(TORCH_NPU.value).absolute()
    installed = find_spec("torch_npu")  # does not import the package
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parents[1]
    return Path(sys.prefix, "torch-npu")


def set_torch_npu_defaults() -> None:
    """Prevent torch in child processes from importing torch_npu before the libraries of torch_npu are loaded."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def api_key() -> str | None:
    """Return the key for servers that require one. The key must never be printed."""
    return (API_KEY.value or "").strip() or None


def kv_cache_space_gib() -> int | None:
    """Return the size in GiB of the KV cache on a CPU, from vLLM's older variable."""
    value = KV_CACHE_SPACE.value
    return int(value) if value else None


# Not in the table above, because only front ends set it, for the engines that they start.
_START_FAILURE = "VGS_START_FAILURE"


def set_start_failure_file(path: str) -> None:
    """Make child processes write the reason to `path` if they fail to start."""
    os.environ[_START_FAILURE] = path


def start_failure_file() -> Path | None:
    """Return the file in which this process's front end looks for a start-up error, or None."""
    path = Path(os.environ.get(_START_FAILURE, ""))
    return path if path.is_file() else None
