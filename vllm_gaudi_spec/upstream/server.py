"""How a server and its engine end, and its answers to bad adapters, images, video and sound."""

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

# Seconds that an engine process gets to answer its last requests and to end by itself.
_ENGINE_GRACE_S = 5.0


@patches("vllm.v1.engine.utils:get_engine_process_shutdown_timeout")
def let_engine_finish(
    original: Callable[..., float | None], request_timeout: float | None, process_timeout: float | None
) -> float | None:
    """Give the engine process a moment between SIGTERM and SIGKILL when the server goes down.

    Reason: with vLLM's default it gets none, so running requests are never reported as aborted, and the server waits
    for their streams for ever. Upstream grants the moment to ROCm only.
    Remove when: `get_engine_process_shutdown_timeout` grants it to every platform.
    """
    timeout = original(request_timeout, process_timeout)
    return _ENGINE_GRACE_S if request_timeout == 0 and timeout == 0 else timeout


# Seconds between an engine's checks for its server.
_LOOK_EVERY_S = 1.0


# Not the constructor: the engine's process loads this plugin in the middle of it.
@patches("vllm.v1.engine.core:EngineCoreProc.run_busy_loop", "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop")
def end_engines_with_their_server(original: Callable[..., None], engine: Any) -> None:
    """Let an engine's process end when the process that started it is gone.

    Reason: the engine of a killed server (SIGKILL, or out of memory) is not notified. It waits for requests for
    ever and keeps the device and its memory.
    Remove when: upstream's `EngineCoreProc` looks for its parent.
    """
    threading.Thread(target=_end_with_server, args=(os.getppid(),), name="watches the server", daemon=True).start()
    original(engine)


def _end_with_server(server: int) -> None:
    while os.getppid() == server:
        time.sleep(_LOOK_EVERY_S)
    logging.getLogger(__name__).error("The server is gone, so its engine ends.")
    os.kill(os.getpid(), signal.SIGTERM)


@patches(
    "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
    "vllm.v1.engine.core:EngineCoreProc.process_output_sockets",
)
def end_engines_with_their_threads(original: Callable[..., None], engine: Any, *args: Any, **named: Any) -> None:
    """Let an engine end when a thread that exchanges messages with its server fails.

    Reason: such a thread ends silently. The engine goes on without it: no request is answered any more, and the server
    is healthy.
    Remove when: upstream's `EngineCoreProc` ends with its threads.
    """
    from vllm.v1.engine import EngineCoreRequestType

    try:
        original(engine, *args, **named)
    except Exception:
        logging.getLogger(__name__).exception(
            "The engine ends, because a thread that exchanges messages with its server failed."
        )
        # What a failed worker's monitor sends: the engine's loop raises, which ends its workers and the process.
        engine.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))


@patches("vllm.v1.engine.core_client:SyncMPClient.shutdown")
def raise_when_the_engine_is_gone(original: Callable[..., None], client: Any, *args: Any, **named: Any) -> None:
    """Let `LLM.generate` raise an EngineDeadError when its engine ends without a last message.

    Reason: it waits for the engine's next output for ever when the process was killed, or could not send any more.
    Remove when: the monitor of upstream's `SyncMPClient` puts an error into its queue of outputs.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    original(client, *args, **named)
    if client.resources.engine_dead:
        client.outputs_queue.put_nowait(EngineDeadError())


@patches("vllm.v1.engine.core:EngineCoreProc._handle_shutdown")
def leave_idle_work_at_shutdown(original: Callable[..., bool], engine: Any) -> bool:
    """Let an engine that is to end call `shut_down` of its scheduler, if that is one of ours.

    Reason: it ends when its scheduler has no requests, and with --shutdown-timeout it waits so long for that. Ours has
    work for idle steps, and nothing informs it that there is no use for it any more.
    Remove when: upstream's `EngineCoreProc` informs its scheduler that it is to end.
    """
    if not engine.is_running() and (shut_down := getattr(engine.scheduler, "shut_down", None)) is not None:
        shut_down()
    return original(engine)


@patches("vllm.entrypoints.launchers.api_server.entry:build_and_serve")
async def fail_with_the_engine(original: Callable[..., Any], engine_client: Any, *args: Any, **named: Any) -> Any:
    """Let the server's process end with exit code 1 when its engine has died.

    Reason: its HTTP server then stops as in an orderly shutdown, and the process ends with code 0: a supervisor that
    restarts failed servers does not restart it.
    Remove when: upstream's `vllm serve` ends with a code other than 0 when its engine is dead.
    """
    ending = await original(engine_client, *args, **named)
    return _fail_after(ending) if _engine_died(engine_client) else ending


def _engine_died(client: Any) -> bool:
    """Whether it ended without a shutdown, which stops the manager of its processes first."""
    manager = getattr(client.engine_core.resources, "engine_manager", None)
    if manager is None:
        return bool(client.errored)
    return bool(manager.failed_proc_name) or (bool(client.errored) and not manager.manager_stopped.is_set())


async def _fail_after(ending: Any) -> None:
    await ending
    logging.getLogger(__name__).error("The engine died, so the server ends. The log above has the reason.")
    raise SystemExit(1)


@patches("vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter")
async def mend_adapter_loading(
    original: Callable[..., Any], models: Any, request: Any, *args: Any, **named: Any
) -> Any:
    """In a server: answer status 400, with the reason, to a request to load a LoRA adapter that cannot be served, and
    read one that is loaded in place once.

    Reason: upstream answers 404 where there is no adapter and 500 to every other fault of one. It gives `load_inplace`
    on to all requests that name the adapter: each would read it from its folder again.
    Remove when: `OpenAIServingModels.load_lora_adapter` distinguishes faults of an adapter from the server's own. That
    it keeps no `load_inplace` can go with vLLM 0.32.
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
    """Refuse sampling parameters in which `find_fault` finds one after vLLM has added the model's end tokens and
    tokenized the bad words.

    Reason: a platform validates a request before that, and knows only how long the words are as text. Upstream's limit
    of their tokens, VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, is one of its own model runner's.
    Remove when: upstream validates requests on the platform after `update_from_tokenizer`, or applies that limit in it.
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
    """Refuse sampling parameters in which `find_fault` finds a fault before vLLM verifies them.

    Reason: upstream's `SamplingParams.verify` compiles a request's regex or grammar, whatever its size, before it asks
    the platform whether the request is valid. A regex of 75,000 words is answered with a server error.
    Remove when: upstream asks the platform first, or bounds the size of a constraint.
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
    """Refuse requests whose input arrives turn by turn (`AsyncLLM.generate` with a stream of inputs).

    Reason: upstream counts drafts after a stop token as computed, takes back tokens that a recurrent state has already
    read, and lets waiting turns hold the rows and the memory that other requests lack.
    Remove when: upstream's scheduler gives a turn the same tokens with and without drafts, also after a preemption.
    """
    from vllm.exceptions import VLLMValidationError

    if named.get("resumable"):
        raise VLLMValidationError("Streamed input is not supported on this platform; send each turn as a request.")
    return original(*args, **named)


# Full scale is 1. The squares of much larger samples overflow, and what is computed of them is no number.
_LOUDEST = 1000.0


@patches(
    "vllm.multimodal.media:ImageMediaIO.load_bytes",
    "vllm.multimodal.media:VideoMediaIO.load_bytes",
    "vllm.multimodal.media:AudioMediaIO.load_bytes",
)
def answer_bad_media(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """In a server: answer status 400 to images, video and sound that cannot be decoded.

    Reason: upstream answers 400 to a ValueError. Pillow raises another error for an image of more pixels than twice its
    MAX_IMAGE_PIXELS, before upstream looks at its own limit (VLLM_MAX_IMAGE_PIXELS); libsndfile raises its own for a
    damaged header; and of a video of one frame Qwen's loader takes every 0th: the answer is 500. Refused besides are
    videos and sounds with nothing in them, and sounds of samples so large, or not finite, that their states would not
    be finite.
    Remove when: `load_bytes` of `ImageMediaIO`, `VideoMediaIO` and `AudioMediaIO` raises a ValueError for these.
    """
    from PIL import Image

    try:
        loaded = original(*args, **named)
    # Errors of libsndfile are RuntimeErrors.
    except (Image.DecompressionBombError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"Failed to load media: {error}") from error
    media = getattr(loaded, "media", loaded)
    if isinstance(media, tuple):  # frames and what is known of them, or samples and their rate
        if not len(media[0]):
            raise ValueError("Failed to load media: there is no frame, and no sample, in it.")
        if isinstance(media[0], np.ndarray) and media[0].dtype.kind == "f" and not (abs(media[0]) <= _LOUDEST).all():
            raise ValueError(f"Failed to load media: a sound has samples beyond {_LOUDEST:.0f}, or not finite.")
    return loaded


@patches("vllm.v1.engine.output_processor:RequestOutputCollector.put")
def answer_contradictions(original: Callable[..., None], collector: Any, output: Any) -> None:
    """In a server: answer status 400, with the reason, to a request that our scheduler ended because no token satisfies
    all its constraints.

    Reason: upstream knows only after sampling that a grammar and, for example, allowed_token_ids exclude each other. It
    ends the request with an error that has no reason, and answers 500.
    Remove when: upstream answers 400 to a request whose structured output allows none of the tokens that its other
    constraints allow.
    """
    from vllm.exceptions import VLLMValidationError

    # The siblings of a sequence that ends with an error in a stream go on, and nobody would abort them.
    for one in getattr(output, "outputs", ()) if getattr(output, "finished", False) else ():
        # Otherwise a stop reason is a token or string that ended the request without an error.
        if getattr(one, "finish_reason", None) == "error" and isinstance(one.stop_reason, str):
            output = VLLMValidationError(one.stop_reason)
            break
    original(collector, output)


# What probes and scrapers ask for. Neither a longer path, nor one with another slash, is the same.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})


@patches("vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.__call__")
def guard_every_path(original: Callable[..., Any], guard: Any, scope: Any, receive: Any, send: Any) -> Any:
    """In a server with an API key: ask for it on every path but `OPEN_PATHS`.

    Reason: upstream guards the paths that begin with /v1, /v2, /inference or /cohere. Others generate too
    (/invocations, /generative_scoring), read prompts (/tokenize, /pooling) or change the server (/scale_elastic_ep).
    Remove when: `AuthenticationMiddleware` guards every path that it does not name.
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
    """Whether the CORS middleware answers by itself: a browser sends no key with that question."""
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
