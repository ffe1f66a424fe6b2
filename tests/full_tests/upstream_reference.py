"""What upstream's CPU platform answers, as JSON: `python -m tests.full_tests.upstream_reference JOB RESULT`.

Runs in its own process, because VLLM_PLUGINS='' (no platform plugin: upstream's CPU platform in the same environment)
must be set before vLLM is imported. The tests import `collect` to do the same on our platform.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# One position: token id -> (log-probability, rank). JSON turns the ids into text, so `Position` is read through `load`.
Position = dict[int, tuple[float, int]]


def plain(positions: Any) -> list[Position]:
    """vLLM's own containers as plain ones; a prompt's first token has no log-probability."""
    return [{token: (lp.logprob, lp.rank) for token, lp in (at or {}).items()} for at in positions or []]


def sampling_params(given: dict[str, Any]) -> Any:
    """JSON made the ids of a logit bias text."""
    from vllm import SamplingParams

    if "logit_bias" in given:
        given = given | {"logit_bias": {int(token): bias for token, bias in given["logit_bias"].items()}}
    return SamplingParams(**given)


def collect(job: dict[str, Any]) -> list[dict[str, Any]]:
    """`job`: model, engine options, and requests: pairs of token ids and sampling parameters, all run together."""
    from tests.full_tests.engines import engine, generate

    prompts = [prompt for prompt, _ in job["requests"]]
    params = [sampling_params(given) for _, given in job["requests"]]
    with engine(job["model"], **job["options"]) as llm:
        outputs = generate(llm, prompts, params)
    results = []
    for output in outputs:
        [completion] = output.outputs
        results.append(
            dict(
                tokens=list(completion.token_ids),
                text=completion.text,
                ended=[completion.finish_reason, completion.stop_reason],
                output=plain(completion.logprobs),
                prompt=plain(output.prompt_logprobs),
                cumulative=completion.cumulative_logprob,
            )
        )
    return results


def upstream(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The same job in a process without plugins."""
    question, answer = folder / "job.json", folder / "result.json"
    question.write_text(json.dumps(job))
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "tests.full_tests.upstream_reference", str(question), str(answer)]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return load(answer)


def load(path: Path) -> list[dict[str, Any]]:
    results = json.loads(path.read_text())
    for result in results:
        for part in ("output", "prompt"):
            result[part] = [{int(token): tuple(pair) for token, pair in at.items()} for at in result[part]]
    return results


def rank_slack(rank: int) -> int:
    """Among the first tokens ranks are exact. Far down hundreds of tokens lie closer together than float32's rounding
    of a logit, so there a rank means a neighborhood."""
    return rank // 50


def compare(name: str, ours: list[Position], theirs: list[Position], close: float) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{name}: {len(ours)} positions for {len(theirs)}"]
    wrong = []
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if len(one) != len(other):
            wrong.append(f"{name}[{index}]: {len(one)} entries for {len(other)}")
            continue
        # The last of the asked-for tokens may be another one when two of them tie.
        strays = set(one) ^ set(other)
        scores = [(one.get(token) or other[token])[0] for token in strays]
        if scores and max(scores) - min(scores) > close:
            wrong.append(f"{name}[{index}]: other tokens {sorted(strays)}")
        for token in set(one) & set(other):
            (score, rank), (their_score, their_rank) = one[token], other[token]
            if abs(score - their_score) > close or abs(rank - their_rank) > rank_slack(their_rank):
                wrong.append(f"{name}[{index}] token {token}: {one[token]} for {other[token]}")
    return wrong


if __name__ == "__main__":
    from vllm.platforms import current_platform

    assert current_platform.is_cpu(), f"upstream's CPU platform expected, got {current_platform}"
    Path(sys.argv[2]).write_text(json.dumps(collect(json.loads(Path(sys.argv[1]).read_text()))))
