"""Patches for the shutdown of a server and its engine, and for the validation of requests and LoRA adapters."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gaudi_spec.config import REFUSED_ADAPTER
from vllm_gaudi_spec.upstream.patching import patches, wrap

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# The number of seconds that an engine process has to answer its last requests and exit.
_ENGINE_GRACE_S = 5.0


@patches("vllm.v1.engine.utils:get_engine_process_shutdown_timeout")
def let_engine_finish(
    original: Callable[..., float | None], request_timeout: float | None, process_timeout: float | None
) -> float | None:
    """Give the engine process time between SIGTERM and SIGKILL when the server shuts down.

    Reason: by default, vLLM kills the engine process immediately, except on ROCm. Running requests are then never
    reported as aborted, and the server waits for their streams forever.
    Remove when: `get_engine_process_shutdown_timeout` returns such a time on every platform.
    """
    timeout = original(request_timeout, process_timeout)
    return _ENGINE_GRACE_S if request_timeout == 0 and timeout == 0 else timeout


# The interval in seconds at which an engine checks whether its server still exists.
_LOOK_EVERY_S = 1.0


# Do not patch the constructor, because the engine process loads this plugin while the constructor is running.
@patches("vllm.v1.engine.core:EngineCoreProc.run_busy_loop", "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop")
def end_engines_with_their_server(original: Callable[..., None], engine: Any) -> None:
    """End an engine process if its parent process no longer exists.

    Reason: if a server is killed (by SIGKILL or when memory runs out), its engine is not informed. The engine then
    waits for requests forever and keeps the device and its memory.
    Remove when: upstream's `EngineCoreProc` monitors its parent.
    """
    threading.Thread(target=_end_with_server, args=(os.getppid(),), name="watches the server", daemon=True).start()
    original(engine)


def _end_with_server(server: int) -> None:
    while os.getppid() == server:
        time.sleep(_LOOK_EVERY_S)
    logging.getLogger(__name__).error("The server has exited, so its engine exits, too.")
    os.kill(os.getpid(), signal.SIGTERM)


@patches(
    "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
    "vllm.v1.engine.core:EngineCoreProc.process_output_sockets",
)
def end_engines_with_their_threads(original: Callable[..., None], engine: Any, *args: Any, **named: Any) -> None:
    """End an engine if a thread that exchanges messages with the server fails.

    Reason: such a thread ends silently, and the engine continues without the thread. Requests are no longer answered,
    but the server still reports that it is healthy.
    Remove when: upstream's `EngineCoreProc` exits when one of its threads fails.
    """
    from vllm.v1.engine import EngineCoreRequestType

    try:
        original(engine, *args, **named)
    except Exception:
        logging.getLogger(__name__).exception(
            "The engine exits, because a thread that exchanges messages with its server failed."
        )
        # Send the message for a failed worker, so that the engine's loop raises an error and ends its processes.
        engine.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))


@patches("vllm.v1.engine.core_client:SyncMPClient.shutdown")
def raise_when_the_engine_is_gone(original: Callable[..., None], client: Any, *args: Any, **named: Any) -> None:
    """Make `LLM.generate` raise EngineDeadError if the engine ends without a final message.

    Reason: `LLM.generate` waits for output forever if the engine process was killed or could not send a message.
    Remove when: the monitor of upstream's `SyncMPClient` puts an error into its output queue.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    original(client, *args, **named)
    if client.resources.engine_dead:
        client.outputs_queue.put_nowait(EngineDeadError())


@patches("vllm.v1.engine.core:EngineCore.post_step")
def take_drafts_from_outputs(original: Callable[..., None], *args: Any, **named: Any) -> None:
    """Skip vLLM's call to the workers that fetches drafts after a step.

    Reason: without async scheduling, a step's output already contains its drafts. Another call to the workers takes
    time, and with pipeline parallelism, it would wait for all steps in flight.
    Remove when: upstream reads drafts from a step's output.
    """


@patches("vllm.v1.engine.core:EngineCoreProc._handle_shutdown")
def leave_idle_work_at_shutdown(original: Callable[..., bool], engine: Any) -> bool:
    """Call our scheduler's `shut_down` when the engine begins to shut down.

    Reason: with --shutdown-timeout, an engine exits only when its scheduler has nothing left to do. Our scheduler also
    uses idle steps for other work, and it must drop this work at shutdown.
    Remove when: upstream's `EngineCoreProc` informs its scheduler.
    """
    if not engine.is_running() and (shut_down := getattr(engine.scheduler, "shut_down", None)) is not None:
        shut_down()
    return original(engine)


@patches("vllm.entrypoints.launchers.api_server.entry:build_and_serve")
async def fail_with_the_engine(original: Callable[..., Any], engine_client: Any, *args: Any, **named: Any) -> Any:
    """End the server process with exit code 1 if its engine has died.

    Reason: vLLM's HTTP server stops as in an orderly shutdown, and the process exits with code 0. A supervisor that
    restarts failed servers would not restart it.
    Remove when: upstream's `vllm serve` exits with a nonzero code if its engine is dead.
    """
    ending = await original(engine_client, *args, **named)
    return _fail_after(ending) if _engine_died(engine_client) else ending


def _engine_died(client: Any) -> bool:
    """Whether the engine ended unexpectedly. In an orderly shutdown, its process manager is stopped first."""
    manager = getattr(client.engine_core.resources, "engine_manager", None)
    if manager is None:
        return bool(client.errored)
    return bool(manager.failed_proc_name) or (bool(client.errored) and not manager.manager_stopped.is_set())


async def _fail_after(ending: Any) -> None:
    await ending
    logging.getLogger(__name__).error("The engine died, so the server exits. The log above has the reason.")
    raise SystemExit(1)


@patches("vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter")
async def mend_adapter_loading(
    original: Callable[..., Any], models: Any, request: Any, *args: Any, **named: Any
) -> Any:
    """If a LoRA adapter cannot be served, respond with status 400 and the reason. Reload an adapter in place only once.

    Reason: upstream responds with status 404 if the adapter does not exist and with 500 to any other problem. It also
    stores `load_inplace` with the adapter, so that each request that uses the adapter would reload it.
    Remove when: `OpenAIServingModels.load_lora_adapter` distinguishes adapter errors from server errors. The
    `load_inplace` part can be removed with vLLM 0.32.
    """
    from vllm.entrypoints.serve import create_error_response

    answer = await original(models, request, *args, **named)
    if (adapter := models.lora_requests.get(request.lora_name)) is not None:
        adapter.load_inplace = False
    message = getattr(getattr(answer, "error", None), "message", "")
    if REFUSED_ADAPTER not in message:
        return answer
    return create_error_response(message=message, err_type="BadRequestError", status_code=HTTPStatus.BAD_REQUEST)


def refuse_tokenized_params(find_fault: Callable[[SamplingParams], str | None]) -> None:
    """Reject sampling parameters if `find_fault` returns a reason after tokenization.

    At that point, vLLM has added the end tokens of the model and tokenized the bad words.
    Reason: a platform validates a request before the bad words are tokenized. Upstream's limit on their tokens,
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, applies only to its own model runner.
    Remove when: upstream validates requests on the platform after `update_from_tokenizer`, or applies this limit there.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    def complete(original: Callable[..., None], params: SamplingParams, *args: Any, **named: Any) -> None:
        original(params, *args, **named)
        if reason := find_fault(params):
            raise VLLMValidationError(reason)

    for name in ("update_from_generation_config", "update_from_tokenizer"):
        wrap(SamplingParams, name, complete)


def refuse_params_before_verification(find_fault: Callable[[SamplingParams], str | None]) -> None:
    """Reject sampling parameters if `find_fault` returns a reason before vLLM verifies them.

    Reason: upstream's `SamplingParams.verify` compiles the regex or grammar of a request, regardless of its size,
    before the platform validates the request. A regex with 75,000 words causes a server error.
    Remove when: upstream asks the platform first, or limits the size of constraints.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    def verify(original: Callable[..., None], params: SamplingParams, *args: Any, **named: Any) -> None:
        if reason := find_fault(params):
            raise VLLMValidationError(reason)
        original(params, *args, **named)

    wrap(SamplingParams, "verify", verify)


@patches("vllm.v1.engine.input_processor:InputProcessor.process_inputs")
def refuse_streamed_inputs(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Reject requests whose input arrives in turns (`AsyncLLM.generate` with a stream of inputs).

    Reason: upstream handles such requests incorrectly with speculation: it counts drafts after a stop token as
    computed, and it rolls back tokens that are already part of a recurrent state. In addition, turns that wait for
    input occupy rows and memory that other requests need.
    Remove when: upstream's scheduler gives each turn the same tokens with and without drafts, even after a preemption.
    """
    from vllm.exceptions import VLLMValidationError

    if named.get("resumable"):
        raise VLLMValidationError("Streamed input is not supported on this platform; send each turn as a request.")
    return original(*args, **named)


# The maximum magnitude of an audio sample. Full scale is 1, and the squares of much larger samples would overflow.
_LOUDEST = 1000.0


@patches(
    "vllm.multimodal.media:ImageMediaIO.load_bytes",
    "vllm.multimodal.media:VideoMediaIO.load_bytes",
    "vllm.multimodal.media:AudioMediaIO.load_bytes",
)
def answer_bad_media(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Respond with status 400 to images, videos, and audio that cannot be decoded.

    Also reject empty videos, empty audio, and audio with samples that are not finite or are so large that hidden states
    would overflow.
    Reason: upstream responds with status 400 only to a ValueError, and with 500 to all other errors. For an image with
    more than twice its MAX_IMAGE_PIXELS, Pillow raises another error before upstream checks its own limit
    (VLLM_MAX_IMAGE_PIXELS). libsndfile raises its own error for a damaged header. Qwen's loader divides by zero for a
    video with one frame.
    Remove when: `load_bytes` of `ImageMediaIO`, `VideoMediaIO`, and `AudioMediaIO` raises a ValueError in these cases.
    """
    from PIL import Image

    try:
        loaded = original(*args, **named)
    # libsndfile's errors are RuntimeErrors.
    except (Image.DecompressionBombError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"Failed to load media: {error}") from error
    media = getattr(loaded, "media", loaded)
    if isinstance(media, tuple):  # frames and metadata, or samples and sample rate
        if not len(media[0]):
            raise ValueError("Failed to load media: it is empty.")
        if isinstance(media[0], np.ndarray) and media[0].dtype.kind == "f" and not (abs(media[0]) <= _LOUDEST).all():
            raise ValueError(f"Failed to load media: audio samples must be finite and within {_LOUDEST}.")
    return loaded


# Exact paths for probes and scrapers, which do not require the API key.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})


@patches("vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.__call__")
def guard_every_path(original: Callable[..., Any], guard: Any, scope: Any, receive: Any, send: Any) -> Any:
    """If the server has an API key, require it for every path except those in `OPEN_PATHS`.

    Reason: upstream protects only paths that begin with /v1, /v2, /inference, or /cohere. Other paths also generate
    text (/invocations, /generative_scoring), process prompts (/tokenize, /pooling), or change the server
    (/scale_elastic_ep).
    Remove when: `AuthenticationMiddleware` protects all paths except those in an explicit list.
    """
    from starlette.datastructures import Headers
    from starlette.responses import JSONResponse

    if scope["type"] in ("http", "websocket"):
        headers = Headers(scope=scope)
        if not (_is_open(scope) or _is_preflight(scope, headers) or guard.verify_token(headers)):
            return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
    return original(guard, scope, receive, send)


def _is_open(scope: Any) -> bool:
    root, path = scope.get("root_path", ""), scope["path"]
    return scope["type"] == "http" and (path in OPEN_PATHS or path.removeprefix(root) in OPEN_PATHS)


def _is_preflight(scope: Any, headers: Any) -> bool:
    """Return whether this is a browser's preflight request, which has no key and is handled by the CORS middleware."""
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
