"""Runs cases on one platform: `python -m tests.models.probe JOBS LOGS`. Jobs and results, to stdout, are lines of JSON.

vLLM is imported once and each case is a fork, so a crash or a patched torch is over with its case. Which platform it is
is decided by VGS_DEVICE and VLLM_PLUGINS, before this starts.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from tests.models import media, vision

RUNS, REFUSED, FAILS, CRASH, TIMEOUT = "runs", "refused", "fails", "crash", "timeout"
SECONDS = 900
# The prompts take 9, in each group of layers: enough that one written at four times its place is outside of the cache.
NUM_BLOCKS = 28
KV_BYTES = 48 << 20
MAX_LEN, MAX_SEQS = 128, 4
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
PLAIN, DRAFTS, MODEL_DRAFTS, DOCTOR = "plain", "drafts", "model drafts", "doctor"
"""What is done with a checkpoint: without drafts, with those of n-grams, with those of a model, looked at by doctor."""
WITH_DRAFTS = (DRAFTS, MODEL_DRAFTS)


# ---- in a fork -------------------------------------------------------------------------------------------


def engine_arguments(job: dict[str, Any], ours: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(
        model=job["folder"],
        dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        kv_cache_memory_bytes=KV_BYTES,
        enforce_eager=not ours,  # ours in its default mode
        disable_log_stats=False,
        seed=0,
    )
    if ours:
        arguments["num_gpu_blocks_override"] = NUM_BLOCKS
    if job["variant"] == DRAFTS:
        arguments["speculative_config"] = NGRAM
    if job["variant"] == MODEL_DRAFTS:
        arguments["speculative_config"] = dict(method="draft_model", model=job["drafter"], num_speculative_tokens=3)
    return arguments | job["engine"]


def generate(job: dict[str, Any], ours: bool, result: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    from tests.models.canaries import Canaries

    canaries = Canaries()
    if ours:
        from vllm_gaudi_spec.device_table import load_backend

        backend = load_backend()
        backend.memory.allocate_kv = canaries.watching(backend.memory.allocate_kv)
    llm = LLM(**engine_arguments(job, ours))
    if job["pooling"] is not None:
        asked = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        found = llm.encode(asked, pooling_task=job["pooling"], use_tqdm=False)
        result["vectors"] = [output.outputs.data.flatten().tolist() for output in found]
        result |= {"canary": canaries.damage(), "guarded": len(canaries.buffers), "outcome": RUNS}
        if ours:
            result["steps"] = llm.collective_rpc("step_report")[0]
        return
    params = SamplingParams(temperature=0.0, max_tokens=job["num_tokens"], ignore_eos=True, logprobs=0)
    ask = partial(llm.generate, sampling_params=params, use_tqdm=False)
    if job["media"] is not None:
        asked = media.ASKED[job["media"]]
        prompts, others = media.requests(asked), media.requests(asked, media.OTHER)
        is_cached = [bool(items) for _, items in asked.prompts]
    else:
        prompts, others = [{"prompt_token_ids": ids} for ids in job["prompts"]], []
        is_cached = [len(ids) > job["engine"].get("block_size", MAX_LEN) for ids in job["prompts"]]
    outputs = ask_again(ask, prompts, others, is_cached, result) if job["again"] else ask(prompts)
    texts = [output.outputs[0] for output in outputs]
    result |= {
        "tokens": [list(text.token_ids) for text in texts],
        "logprobs": [
            [at[token].logprob for token, at in zip(text.token_ids, text.logprobs, strict=True)] for text in texts
        ],
        "canary": canaries.damage(),
    }
    if not llm.model_config.is_attention_free:
        result["guarded"] = len(canaries.buffers)
    if ours:
        result["steps"] = llm.collective_rpc("step_report")[0]
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    result["preemptions"] = int(counts["vllm:num_preemptions"])
    if job["variant"] in WITH_DRAFTS:
        for name in ("accepted", "draft"):
            result[name] = int(counts.get(f"vllm:spec_decode_num_{name}_tokens", 0))
    result["outcome"] = RUNS


def ask_again(
    ask: Callable[[list[dict[str, Any]]], list[Any]],
    prompts: list[dict[str, Any]],
    others: list[dict[str, Any]],
    is_cached: list[bool],
    result: dict[str, Any],
) -> Any:
    """What is answered where the prompts are in the prefix cache; noted is how much of those with `is_cached` was,
    before and after they were asked. `others`: the same tokens with other items, which are there all along."""
    if others:
        ask(others)
    rounds = [ask(prompts) for _ in range(2)]
    result["cached"] = [[output.num_cached_tokens for output in compress(outputs, is_cached)] for outputs in rounds]
    first, second = ([list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds)
    result["same_again"] = first == second
    return rounds[-1]


def doctor(job: dict[str, Any]) -> dict[str, Any]:
    from vllm_gaudi_spec.tools.doctor.findings import PROBLEM, conclude
    from vllm_gaudi_spec.tools.doctor.pair import check_pair

    findings = list(check_pair(engine_arguments(job, ours=True)))
    return {
        "outcome": "problem" if any(one.severity == PROBLEM for one in findings) else "fine",
        "error": conclude(findings),
    }


def described(error: BaseException) -> dict[str, Any]:
    from vllm_gaudi_spec.config import in_one_line

    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages/torch/" not in frame.filename
    ]
    where = ""
    if frames:
        file = frames[-1].filename.split("site-packages/")[-1]
        root = str(Path(__file__).parents[2]) + "/"
        where = f"{file.removeprefix(root)}:{frames[-1].lineno} {frames[-1].name}"
    return {"type": type(error).__name__, "error": in_one_line(error)[:400], "where": where}


def run(job: dict[str, Any], ours: bool) -> dict[str, Any]:
    if job["variant"] == DOCTOR:
        return doctor(job)
    from vllm.engine.arg_utils import EngineArgs

    configured = []
    configure = EngineArgs.create_engine_config

    def noted(*args: Any, **named: Any) -> Any:
        answer = configure(*args, **named)
        configured.append(True)
        return answer

    EngineArgs.create_engine_config = noted
    result: dict[str, Any] = {}
    try:
        generate(job, ours, result)
    except Exception as error:
        traceback.print_exc()
        result = described(error)
        ours_refused = result["type"] == "UnsupportedConfigError" or "UnsupportedConfigError" in result["error"]
        if configured:
            result["outcome"] = CRASH
            result["late_refusal"] = ours_refused
        else:
            result["outcome"] = REFUSED if ours_refused else FAILS
    return result


# ---- around the forks ------------------------------------------------------------------------------------


def forked(function: Callable[[], dict[str, Any]], log: Path) -> dict[str, Any]:
    """What the function returns in a process of its own, whose output goes to a file."""
    started = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            answer = json.dumps(function()).encode()
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(SECONDS)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    left = signal.alarm(0)
    seconds = round(time.monotonic() - started, 2)
    if answer:
        return json.loads(answer) | {"seconds": seconds}
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and left == 0:
        return {"outcome": TIMEOUT, "error": f"no end in {SECONDS} s", "seconds": seconds}
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    error = f"ended by signal {-code}" if code < 0 else f"ended with status {code}: {last}"
    return {"outcome": CRASH, "type": "", "error": error, "where": "", "seconds": seconds}


def import_vllm() -> bool:
    """Everything that cases share; whether the platform is ours."""
    import vllm.model_executor.models.registry as registry
    import vllm.v1.engine.core  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # vLLM looks at a model's class in a process of its own, which would import everything anew for each.
    registry._run_in_subprocess = lambda function: function()
    return type(current_platform).__module__.startswith("vllm_gaudi_spec")


def main() -> int:
    jobs = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    logs = Path(sys.argv[2])
    logs.mkdir(parents=True, exist_ok=True)
    # What vLLM prints is no result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = jobs[0]["side"]
    print(f"{side}: importing vLLM for {len(jobs)} runs", file=sys.stderr, flush=True)
    if jobs[0]["vision"]:
        vision.make_importable()
    ours = import_vllm()
    assert ours == (side != "upstream"), f"the platform of {side} is not the one that was asked for"
    gc.collect()
    gc.freeze()
    has_text = set()
    for job in jobs:
        if job["variant"] in WITH_DRAFTS and job["case"] not in has_text:
            continue  # there is nothing to compare with
        log = logs / f"{side}-{job['case']}-{job['variant'].replace(' ', '-')}.log"
        result = forked(partial(run, job, ours), log)
        if "error" in result:
            result["error"] = result["error"].replace(job["folder"], Path(job["folder"]).name)
        result |= {name: job[name] for name in ("case", "variant")}
        if "tokens" in result:
            has_text.add(job["case"])
        print(json.dumps(result), file=results, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
