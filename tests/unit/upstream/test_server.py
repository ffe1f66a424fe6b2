"""Patches of the server still have their reasons: these fail when upstream moves; then review the patch."""

import asyncio
import inspect
import io
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.entrypoints.serve.middleware import authenticate
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import LoRAAdapterNotFoundError, VLLMValidationError
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.counter import AtomicCounter
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.utils import CoreEngineProcManager

from tests.support.releases import make_arg_parser, only_0_32
from tests.support.videos import video
from vllm_gaudi_spec import config, upstream
from vllm_gaudi_spec.refusals.requests import check_constraint_size, check_logit_edits
from vllm_gaudi_spec.upstream import server


@pytest.fixture
def unpatch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], None]:
    """Restore a function of vLLM for this test, whatever was patched before it."""
    return lambda owner, name: monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))


def test_only_rocm_lets_its_engine_finish_by_default() -> None:
    """Fails when upstream gives every platform a moment: then `let_engine_finish` can go."""
    from vllm.v1.engine import utils

    assert inspect.unwrap(utils.get_engine_process_shutdown_timeout)(0, 0) == 0
    upstream.let_engine_finish()
    assert "get_engine_process_shutdown_timeout(" in inspect.getsource(utils.CoreEngineProcManager)
    assert utils.get_engine_process_shutdown_timeout(0, 0) > 0
    assert utils.get_engine_process_shutdown_timeout(7, 3) == 3


def test_upstreams_engine_still_never_looks_for_its_server() -> None:
    """Fails when it does: then `end_engines_with_their_server` can go."""
    source = inspect.getsource(engine_core)
    assert not any(word in source for word in ("getppid", "parent_process", "PDEATHSIG"))
    upstream.end_engines_with_their_server()
    for engine in (engine_core.EngineCoreProc, engine_core.DPEngineCoreProc):
        assert "run_busy_loop" in vars(engine), "it runs another's loop"
    assert "engine_core.run_busy_loop()" in source


@pytest.mark.parametrize("name", ["process_input_sockets", "process_output_sockets"])
def test_an_engine_ends_with_its_threads(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fails when upstream does something about a failed thread: then `end_engines_with_their_threads` can go."""
    upstream.end_engines_with_their_threads()
    engine = object.__new__(engine_core.EngineCoreProc)
    engine.input_queue, engine.output_queue = queue.Queue(), queue.Queue()
    engine.output_queue.put((0, object()))
    engine.tensor_ipc_receiver = None
    address = "tcp://127.0.0.1:0"
    arguments = ([], None, b"", None) if name == "process_input_sockets" else ([address], None, 0)
    with pytest.raises(AttributeError):
        inspect.unwrap(getattr(engine_core.EngineCoreProc, name))(engine, *arguments)
    assert engine.input_queue.empty()
    engine.output_queue.put((0, object()))
    with caplog.at_level("ERROR"):
        getattr(engine, name)(*arguments)
    assert "AttributeError" in caplog.text
    with pytest.raises(RuntimeError, match="Executor failed"):
        engine._handle_client_request(*engine.input_queue.get_nowait())
    assert f"target=self.{name}" in inspect.getsource(engine_core.EngineCoreProc)


def test_who_waits_for_a_dead_engine_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream's client raises one by itself: then `raise_when_the_engine_is_gone` can go."""
    client = object.__new__(SyncMPClient)
    client.outputs_queue = queue.Queue()
    client._finalizer = SimpleNamespace(alive=True, detach=lambda: None)
    manager = SimpleNamespace(monitor_engine_liveness=lambda: None)

    def let_engine_die() -> None:
        client.resources = SimpleNamespace(engine_dead=False, engine_manager=manager)
        client.start_engine_core_monitor()
        for thread in threading.enumerate():
            if thread.name == "MPClientEngineMonitor":
                thread.join()
        assert client.resources.engine_dead

    monkeypatch.setattr(SyncMPClient, "shutdown", inspect.unwrap(SyncMPClient.shutdown))
    let_engine_die()
    assert client.outputs_queue.empty()
    upstream.raise_when_the_engine_is_gone()
    let_engine_die()
    with pytest.raises(EngineDeadError):
        client.get_output()


@pytest.mark.parametrize("seconds", [0, 30])
def test_idle_work_does_not_keep_an_engine_from_ending(seconds: int) -> None:
    """By an abort of its requests, or by waiting for them. Without the patch the first two would go on for ever; fails
    when upstream's engine informs its scheduler: then `leave_idle_work_at_shutdown` can go."""
    calls: list[str] = []

    class Scheduler:
        has_idle_work = True

        def has_requests(self) -> bool:
            return self.has_idle_work

        def shut_down(self) -> None:
            calls.append("shut down")
            self.has_idle_work = False

        def get_num_unfinished_requests(self) -> int:
            return 0

        def finish_requests(self, *_: Any) -> list[Any]:
            return []

    upstream.leave_idle_work_at_shutdown()
    engine = object.__new__(engine_core.EngineCoreProc)
    engine.scheduler = Scheduler()
    engine.vllm_config = SimpleNamespace(shutdown_timeout=seconds)
    engine.engines_running, engine.batch_queue = False, None
    engine.shutdown_state = engine_core.EngineShutdownState.RUNNING
    assert engine._handle_shutdown()
    assert not calls
    engine.shutdown_state = engine_core.EngineShutdownState.REQUESTED
    unpatched = inspect.unwrap(engine_core.EngineCoreProc._handle_shutdown)
    assert unpatched(engine)
    assert not calls
    assert not engine._handle_shutdown()


def test_upstream_still_ends_as_if_nothing_had_happened() -> None:
    """When `serve_http` or `run_server_worker` knows of a dead engine, `fail_with_the_engine` can go."""
    source = inspect.getsource(launcher.serve_http)
    assert "await server_task\n        return dummy_shutdown()" in source
    ending = inspect.getsource(entry.run_server_worker)
    assert "shutdown_task = await build_and_serve(" in ending
    assert "errored" not in source + ending
    assert "self.failed_proc_name = proc.name" in inspect.getsource(CoreEngineProcManager.monitor_engine_liveness)
    assert "self.manager_stopped.set()" in inspect.getsource(CoreEngineProcManager.shutdown)


def load_adapter(failure: str | None, **asked: Any) -> tuple[Any, dict[str, Any]]:
    """Return a server's answer to a request to load an adapter, where the engine may fail, and its adapters."""

    class Engine:
        async def add_lora(self, request: Any) -> bool:
            if failure is not None:
                raise Exception(f"Call to add_lora method failed: {failure}")
            return True

    models = OpenAIServingModels.__new__(OpenAIServingModels)
    models.registry = SimpleNamespace(is_base_model=lambda name: False)
    models.engine_client, models.lora_requests, models.lora_id_counter = Engine(), {}, AtomicCounter(0)
    models.lora_resolver_lock = defaultdict(asyncio.Lock)
    request = LoadLoRAAdapterRequest(lora_name="name", lora_path="folder", **asked)
    return asyncio.run(models.load_lora_adapter(request)), models.lora_requests


def test_upstream_still_blames_the_server_for_a_bad_adapter(unpatch: Callable[[Any, str], None]) -> None:
    refused = f"LoRA adapter name {config.REFUSED_ADAPTER}: because"
    unpatch(OpenAIServingModels, "load_lora_adapter")
    assert load_adapter(refused)[0].error.code == 500
    upstream.mend_adapter_loading()
    answer = load_adapter(refused)[0].error
    assert answer.code == 400
    assert "because" in answer.message
    assert load_adapter("no memory")[0].error.code == 500
    assert load_adapter(str(LoRAAdapterNotFoundError("name", "folder")))[0].error.code == 404


@only_0_32
def test_upstream_still_reads_an_adapter_in_place_for_each_request(unpatch: Callable[[Any, str], None]) -> None:
    unpatch(OpenAIServingModels, "load_lora_adapter")
    assert load_adapter(None, load_inplace=True)[1]["name"].load_inplace
    upstream.mend_adapter_loading()
    assert not load_adapter(None, load_inplace=True)[1]["name"].load_inplace


def test_upstream_still_takes_bad_words_of_any_number_of_tokens(unpatch: Callable[[Any, str], None]) -> None:
    """Fails when `update_from_tokenizer` has a limit: then `refuse_tokenized_params` can go."""

    class Tokenizer:
        max_token_id = 9

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [1] * len(text.strip())

    tokenizer: Any = Tokenizer()
    params = SamplingParams(bad_words=["x" * (config.MAX_BAD_WORD_TOKENS + 1)])
    unpatch(SamplingParams, "update_from_tokenizer")
    params.update_from_tokenizer(tokenizer)
    assert params.bad_words_token_ids
    upstream.refuse_tokenized_params(check_logit_edits)
    with pytest.raises(VLLMValidationError, match="have 1025 tokens"):
        params.update_from_tokenizer(tokenizer)
    SamplingParams(bad_words=["x"]).update_from_tokenizer(tokenizer)
    process = inspect.getsource(InputProcessor.process_inputs)
    steps = ["current_platform.validate_request(", ".update_from_generation_config(", ".update_from_tokenizer("]
    assert sorted(steps, key=process.index) == steps


@pytest.mark.parametrize(
    "constraint",
    [dict(regex="(a|b)" * 60_000), dict(choice=["word"] * 40_000), dict(json=dict(enum=["word"] * 40_000))],
    ids=["regex", "choice", "json"],
)
def test_large_constraint_is_refused_before_it_is_compiled(
    constraint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params: Any = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    small: Any = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    compiled: list[SamplingParams] = []
    monkeypatch.setattr(SamplingParams, "verify", compiled.append)
    upstream.refuse_params_before_verification(check_constraint_size)
    with pytest.raises(VLLMValidationError, match="use at most 262144"):
        params.verify()
    small.verify()
    assert compiled == [small]
    process = inspect.getsource(InputProcessor.process_inputs)
    assert process.index("._validate_params(") < process.index("current_platform.validate_request(")


HUGE_IMAGE = io.BytesIO()
Image.new("1", (20_000, 20_000)).save(HUGE_IMAGE, "png")


@pytest.mark.parametrize(
    ("loader", "data", "error", "words"),
    [
        (ImageMediaIO(), HUGE_IMAGE.getvalue(), Image.DecompressionBombError, "400000000 pixels"),
        (VideoMediaIO(ImageMediaIO(), video_backend="qwen2_vl"), video(frames=1), ZeroDivisionError, "by zero"),
    ],
    ids=["a huge image", "a video of one frame"],
)
def test_upstream_still_blames_the_server(
    loader: Any, data: bytes, error: type[Exception], words: str, unpatch: Callable[[Any, str], None]
) -> None:
    for media in (ImageMediaIO, VideoMediaIO, AudioMediaIO):
        unpatch(media, "load_bytes")
    with pytest.raises(error):
        loader.load_bytes(data)
    upstream.answer_bad_media()
    with pytest.raises(ValueError, match=words):
        loader.load_bytes(data)


@only_0_32
def test_a_video_of_which_no_frame_decodes_is_a_bad_request() -> None:
    upstream.answer_bad_media()
    with pytest.raises(ValueError, match="it is empty"):
        VideoMediaIO(ImageMediaIO()).load_bytes(video(frames=1))
    assert len(VideoMediaIO(ImageMediaIO()).load_bytes(video()).media[0]) == 4


def test_bad_sounds_are_bad_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libsndfile, which raises RuntimeErrors; `make test` does not have it."""

    def load(_: Any, data: bytes) -> tuple[np.ndarray, float]:
        if data == b"RIFF":
            raise RuntimeError("Error in WAV file. No 'data' chunk marker.")
        return np.frombuffer(data, np.float32), 16_000.0

    monkeypatch.setattr(AudioMediaIO, "load_bytes", load)
    upstream.answer_bad_media()
    with pytest.raises(ValueError, match="No 'data' chunk"):
        AudioMediaIO().load_bytes(b"RIFF")
    with pytest.raises(ValueError, match="it is empty"):
        AudioMediaIO().load_bytes(b"")
    for bad in (np.inf, -3e38, np.nan):
        with pytest.raises(ValueError, match="must be finite"):
            AudioMediaIO().load_bytes(np.array([1.0, bad], np.float32).tobytes())
    sound, _ = AudioMediaIO().load_bytes(np.array([1.0, 2.0], np.float32).tobytes())
    assert sound.tolist() == [1.0, 2.0]


KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(
    scope="module",
    params=[["--api-key", "secret"], ["--root-path", "/behind"]],
    ids=["option", "variable and root path"],
)
def keyed_app(request: pytest.FixtureRequest) -> FastAPI:
    """vLLM's own application, with all routes that any model and setting give it."""
    upstream.guard_every_path()
    words = ["--allowed-origins", '["http://page"]', *request.param]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    with pytest.MonkeyPatch.context() as patch:
        if "--api-key" not in request.param:
            patch.setenv("VLLM_API_KEY", "secret")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        return build_app(args, get_args(SupportedTask))


def test_every_route_asks_for_the_key(keyed_app: FastAPI) -> None:
    client, root = TestClient(keyed_app, raise_server_exceptions=False), keyed_app.root_path or ""
    unguarded, asked = set(), set()
    for route in keyed_app.routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        if isinstance(route, WebSocketRoute):
            with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect(root + path):
                pass
            assert denied.value.status_code == 401
            continue
        for method in {*(getattr(route, "methods", None) or {"GET"}), "OPTIONS"}:
            asked.add(path)
            if client.request(method, root + path, follow_redirects=False).status_code != 401:
                unguarded.add(path)
    assert unguarded == server.OPEN_PATHS
    assert asked > {"/invocations", "/tokenize", "/generative_scoring", "/scale_elastic_ep", "/openapi.json"}


@pytest.mark.parametrize(
    "path",
    ["/health/", "//health", "/HEALTH", "/health/../tokenize", "/health%2f..%2ftokenize", "/metricsx", "/no_such_path"],
)
def test_no_spelling_of_an_open_path_opens_another(path: str, keyed_app: FastAPI) -> None:
    client = TestClient(keyed_app, raise_server_exceptions=False)
    for prefix in {"", keyed_app.root_path or ""}:
        assert client.post(prefix + path, follow_redirects=False).status_code == 401


def test_browsers_may_ask_before_they_send_the_key(keyed_app: FastAPI) -> None:
    client = TestClient(keyed_app)
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    answer = client.options("/tokenize", headers=asks)
    assert answer.status_code == 200, answer.text
    assert client.options("/tokenize", headers={"Origin": "http://page"}).status_code == 401
    assert client.get("/openapi.json", headers=KEY).status_code == 200


def test_upstream_still_guards_some_prefixes_only() -> None:
    """Fails when it guards every path: then `guard_every_path` can go."""
    assert "/tokenize".startswith(authenticate.GUARDED_PREFIX) is False
    assert "startswith(GUARDED_PREFIX)" in inspect.getsource(inspect.unwrap(AuthenticationMiddleware.__call__))


def test_streamed_input_is_refused() -> None:
    """Fails when requests are no longer marked: then `refuse_streamed_inputs` refuses nothing."""
    assert "resumable=True" in inspect.getsource(AsyncLLM._add_streaming_input_request)
    upstream.refuse_streamed_inputs()
    with pytest.raises(VLLMValidationError, match="send each turn as a request"):
        InputProcessor.process_inputs(SimpleNamespace(), "a", [1], SamplingParams(), resumable=True)
