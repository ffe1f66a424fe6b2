"""Mixed load through `vllm serve` for minutes, and what is left behind: `make soak`.

python -m tests.full_tests.soak --seconds 600 --method draft_model

Two kinds of clients at a time: `vllm bench serve`, and our own (soak_load.py), which come in bursts, stream or not, and
often leave before their answer ends. Memory for KV is so scarce that requests are preempted. Without --model the target
is a tiny Llama, whose engine takes hundreds of steps a second: leaks are made of steps and requests, not of parameters.

At the end must hold, and each is printed:
- every greedy or seeded answer, aborted ones as far as they came, equals what the request gets alone: from an engine
  without speculation, and from this server before and after the load;
- nothing is held: KV blocks (vLLM's metric, its scheduler's own count, and its reset of the prefix cache), rows of the
  runner, what drafters remember, what the pacing scheduler remembers, records of requests and steps in the process;
- no step signature appeared that warm-up had not listed;
- no process of the server has grown by 2 % or more: the median of its resident memory over the last tenth of the load,
  beside that over the first tenth behind a warm quarter.

Exit status: 0 when all hold, 1 when one does not, 2 for options that make no sense.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.full_tests import tiny_models
from tests.full_tests.engines import engine
from tests.full_tests.equality import Tally
from tests.full_tests.resident import Growth, Resident, meet_every_length
from tests.full_tests.server import Server, end_with_parent
from tests.full_tests.soak_load import Attempt, Clients, answers_of, body_of, catalog
from tests.full_tests.workload import Answer, run_alone
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared, positive

ROOT = Path(__file__).resolve().parents[2]
NUM_DRAFTS = 4
KV_TOKENS = 2560
"""Room for five of the longest requests, of 24 that may run."""
BUDGET = 128
"""Tokens of a step: prompts are cut, and a step has fewer lengths than oneDNN keeps programs for."""
# Under load drafting costs more than it brings, so lengths follow it: from four drafts to none and back.
BY_LOAD = dict(num_speculative_tokens_per_batch_size=[[1, 8, NUM_DRAFTS], [9, 16, 2], [17, 64, 0]])
NOT_SLOWED = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Method:
    config: dict[str, Any]
    """vLLM's speculative configuration."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `additional_config.gaudi_spec`."""
    model: Callable[[str, Path], str] | None = None
    """From the tiny target's folder and an empty one to a drafter's."""
    shares_blocks: bool = False
    """Whether its KV stands in the target's blocks, which are twice as large then."""


def nearly_the_target(target: str, folder: Path) -> str:
    """A drafter that is right most of the time."""

    def build() -> Any:
        model = tiny_models.looping_llama()
        with torch.no_grad():
            model.lm_head.weight.add_(0.2 * model.lm_head.weight.std() * torch.randn_like(model.lm_head.weight))
        return model

    return tiny_models.save(build, folder)


COUPLED = dict(draft_sample_method="coupled", rejection_sample_method="strict")
NGRAM = dict(prompt_lookup_min=1, prompt_lookup_max=4)
METHODS = {
    "draft_model": Method(
        dict(method="draft_model", **COUPLED, **BY_LOAD), model=nearly_the_target, shares_blocks=True
    ),
    "universal_draft": Method(
        dict(method="universal_draft", **COUPLED, **BY_LOAD), model=tiny_models.save_renumbered, shares_blocks=True
    ),
    "retokenize": Method(
        dict(method="universal_draft", **COUPLED, **BY_LOAD),
        dict(universal_context="retokenize", universal_kv_len=1024),
        tiny_models.save_renumbered,
    ),
    "ngram_gpu": Method(dict(method="ngram_gpu", **NGRAM, **BY_LOAD)),
    "ngram": Method(dict(method="ngram", **NGRAM, **BY_LOAD)),
    # Of past answers it keeps as many as it is told to: so few that they are all there behind the warm quarter.
    "suffix": Method(dict(method="suffix", suffix_decoding_max_cached_requests=100, **BY_LOAD)),
}


class Soak:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.method = METHODS[options.method]
        self.known = catalog(options.requests, options.seed)
        # Before any engine has seen them: vLLM writes a choice anew as a grammar, where it stands.
        self.bodies = [body_of(request) for request in self.known]
        self.figures: dict[str, Any] = {}
        self.problems: list[str] = []
        self.model = options.model or tiny_models.save(tiny_models.looping_llama, folder / "target")

    def run(self) -> None:
        say(f"{len(self.known)} requests alone, without speculation")
        with engine(self.model, enable_prefix_caching=False) as llm:
            self.alone = run_alone(llm, self.known)
        say("starting the server")
        self.server = self._serve()
        try:
            say("prompts of every length that a step may have")
            meet_every_length(self.server, BUDGET)
            say("the same requests alone, before the load")
            self._compare_alone("before")
            memory, clients = self._load()
            self._compare_load(clients.attempts)
            say("the same requests alone, after the load")
            self._compare_alone("after")
            self._look_inside()
            self._check_memory(memory)
        finally:
            self.server.stop()

    # --- the server and its load ---

    def _serve(self) -> Server:
        config = self.method.config | dict(num_speculative_tokens=NUM_DRAFTS)
        drafter = self.options.draft_model
        if drafter is None and self.method.model is not None:
            drafter = self.method.model(self.model, self.folder / "drafter")
        if drafter is not None:
            config["model"] = drafter
        own = {"gaudi_spec": {"adaptive": True} | self.method.options}
        kv_bytes = self.options.kv_cache_bytes or KV_TOKENS * 1024 * (2 if self.method.shares_blocks else 1)
        inside = f"{__package__}.soak_inside.Inside"
        return Server(
            self.model,
            self.folder / "server.log",
            *("--max-model-len", "512", "--max-num-seqs", "24", "--max-num-batched-tokens", str(BUDGET)),
            *("--kv-cache-memory-bytes", str(kv_bytes), "--block-size", "32"),
            *("--speculative-config", json.dumps(config), "--additional-config", json.dumps(own)),
            *("--worker-extension-cls", inside, "--disable-uvicorn-access-log"),
            environment={"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)} | NOT_SLOWED,
        )

    def _load(self) -> tuple[Resident, Clients]:
        seconds = self.options.seconds
        bench = self._start_bench()
        memory = Resident.of(self.server)
        clients = Clients(str(self.server.client.base_url), self.bodies, NUM_DRAFTS, self.options.seed)
        say(f"{seconds} s of load")
        asyncio.run(self._watch(clients, memory))
        self._end_bench(bench)
        self.server.wait_idle(60)
        return memory, clients

    async def _watch(self, clients: Clients, memory: Resident) -> None:
        load = asyncio.create_task(clients.run(self.options.seconds))
        began, next_line = time.monotonic(), 10
        while not load.done():
            await asyncio.wait([load], timeout=1)
            elapsed = time.monotonic() - began
            if elapsed < self.options.seconds:
                memory.sample()
            if elapsed >= next_line:
                next_line += 10
                say(await asyncio.to_thread(self._progress, clients, memory, elapsed))
        await load

    def _progress(self, clients: Clients, memory: Resident, elapsed: float) -> str:
        metric = self.server.metric
        return (
            f"{elapsed:4.0f} s  {clients.phase:5}  {len(clients.attempts)} sent, {clients.num_open} open; "
            f"{metric('vllm:num_requests_running'):.0f} running, {metric('vllm:num_requests_waiting'):.0f} waiting, "
            f"{metric('vllm:num_preemptions_total'):.0f} preemptions; "
            f"{memory.now:.0f} MiB"
        )

    def _start_bench(self) -> subprocess.Popen[bytes]:
        """As many requests as fit into the time that is left when it has started."""
        self.bench_requests = max(int(2 * (self.options.seconds - 30)), 10)
        command = [
            str(Path(sys.executable).with_name("vllm")),
            *("bench", "serve", "--backend", "openai", "--host", "127.0.0.1", "--port", str(self.server.port)),
            *("--model", self.model, "--served-model-name", "tiny", "--dataset-name", "random"),
            *("--random-prefix-len", "64", "--random-input-len", "60", "--random-output-len", "24"),
            *("--random-range-ratio", "0.5", "--num-prompts", str(self.bench_requests), "--request-rate", "2"),
            *("--burstiness", "0.5", "--seed", str(self.options.seed), "--temperature", "0", "--disable-tqdm"),
            *("--save-result", "--result-dir", str(self.folder), "--result-filename", "bench.json"),
        ]
        with (self.folder / "bench.log").open("w") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent
            )

    def _end_bench(self, bench: subprocess.Popen[bytes]) -> None:
        try:
            status = bench.wait(timeout=120 + self.options.seconds)
        finally:
            bench.kill()
        if status:
            self.problems.append(f"vllm bench serve: status {status}: {(self.folder / 'bench.log').read_text()[-500:]}")
            return
        found = json.loads((self.folder / "bench.json").read_text())
        self.figures["bench_completed"] = found["completed"]
        self._expect("vllm bench serve: requests completed", found["completed"], self.bench_requests)

    # --- answers ---

    def _compare_alone(self, when: str) -> None:
        tally = Tally()
        for place, body in enumerate(self.bodies):
            ours = answers_of(self.server.post("/v1/completions", body)["choices"])
            self._compare(tally, place, ours, is_whole=True)
        self._note(tally, f"alone_{when}")

    def _compare_load(self, attempts: list[Attempt]) -> None:
        tally = Tally()
        for attempt in attempts:
            if attempt.request is not None and not attempt.error:
                self._compare(tally, attempt.request, attempt.answers, is_whole=attempt.is_whole)
        errors = [attempt.error for attempt in attempts if attempt.error]
        self.problems += [f"{len(errors)} requests ended in an error, such as {errors[0]}"] if errors else []
        whole = sum(attempt.is_whole for attempt in attempts)
        self.figures |= {
            "sent": len(attempts),
            "finished": whole,
            "aborted": sum(attempt.has_left for attempt in attempts),
            "errors": len(errors),
            "aborted_with_tokens": sum(bool(a.answers) for a in attempts if a.has_left),
        }
        self._note(tally, "load")
        counts = {name: int(self.server.metric(f"vllm:{name}_total")) for name in _COUNTERS}
        self.figures |= counts
        for name in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens"):
            self._expect_some(name, counts[name])
        self._expect_some("aborted", self.figures["aborted"])

    def _compare(self, tally: Tally, place: int, ours: list[Answer], *, is_whole: bool) -> None:
        name, expected = self.known[place].name, self.alone[place]
        if is_whole and len(ours) != len(expected):
            tally.different.append(f"{name}: {len(ours)} completions for {len(expected)}")
            return
        scores_at = self._scores_of(place) if set(self.bodies[place]) <= _PLAIN else None
        for answer, known in zip(ours, expected, strict=False):
            if is_whole and answer.token_ids == known.token_ids and answer != known:
                tally.different.append(f"{name}: {answer} for {known}")
                continue
            ids = known.token_ids if is_whole else known.token_ids[: len(answer.token_ids)]
            tally.compare(name, answer.token_ids, ids, scores_at)

    def _scores_of(self, place: int) -> Callable[[int], Any]:
        """Of each candidate for a position, as the idle server says it."""

        def scores_at(position: int) -> Any:
            prompt = [*self.known[place].prompt, *self.alone[place][0].token_ids[:position]]
            asked = dict(prompt=prompt, max_tokens=1, temperature=0, logprobs=20, return_tokens_as_token_ids=True)
            [found] = self.server.complete(**asked)["choices"][0]["logprobs"]["top_logprobs"]
            return defaultdict(lambda: -torch.inf, {int(k.removeprefix("token_id:")): v for k, v in found.items()})

        return scores_at

    def _note(self, tally: Tally, what: str) -> None:
        compared = tally.equal + tally.ties + len(tally.different)
        self.figures |= {f"{what}_compared": compared, f"{what}_equal": tally.equal, f"{what}_ties": tally.ties}
        self._expect_some(f"{what}: answers compared", compared)
        if tally.different:
            shown = "\n  ".join(tally.different[:5])
            self.problems.append(f"{what}: {len(tally.different)} of {compared} answers differ:\n  {shown}")

    # --- what is left ---

    def _look_inside(self) -> None:
        self.server.wait_idle()
        report, inside = (self._rpc(method) for method in ("step_report", "inside"))
        reset = self.server.client.post("/reset_prefix_cache").json()["success"]
        self.figures |= {
            "blocks": inside["blocks"],
            "blocks_leaked": inside["blocks"] - inside["free_blocks"],
            "kv_cache_usage": self.server.metric("vllm:kv_cache_usage_perc"),
            "in_use": report["in_use"],
            "scheduler": inside["scheduler"],
            "alive": inside["alive"],
            "steps": report["steps"],
        }
        self._expect("blocks that are not free", self.figures["blocks_leaked"], 0)
        self._expect("vllm:kv_cache_usage_perc", self.figures["kv_cache_usage"], 0)
        self._expect("reset of the prefix cache", reset, True)
        for where in ("in_use", "scheduler"):
            for name, count in self.figures[where].items():
                self._expect(f"{where}: {name}", count, 0)
        for name, count in inside["alive"].items():
            if count > _MOST_ALIVE:
                self.problems.append(f"{count} objects {name} are alive while nothing runs")
        unexpected = report["graphs"]["unexpected"]
        self._expect("step signatures that warm-up had not listed", unexpected, [])

    def _rpc(self, method: str) -> dict[str, Any]:
        response = self.server.client.post("/collective_rpc", json={"method": method})
        assert response.status_code == 200, response.text
        [answer] = response.json()["results"]
        return answer

    def _check_memory(self, memory: Resident) -> None:
        self.figures["memory"] = {name: asdict(growth) for name, growth in memory.growth().items()}
        self.problems += memory.grown()

    def _expect(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.problems.append(f"{what}: {found}, not {expected}")

    def _expect_some(self, what: str, count: int) -> None:
        if not count:
            self.problems.append(f"{what}: none, so the run shows nothing of it")


_COUNTERS = ("num_preemptions", "prefix_cache_hits", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
_PLAIN = {"model", "prompt", "return_token_ids", "temperature", "max_tokens", "ignore_eos", "logprobs"}
"""What greedy requests say whose candidates have the model's own scores. A sampled one says its seed as well."""
_MOST_ALIVE = 4
"""Records of the last step or two stay until the next."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def show(figures: dict[str, Any]) -> None:
    rows = {name: value for name, value in figures.items() if name != "memory"}
    for name, growth in figures.get("memory", {}).items():
        rows[f"memory of {name}"] = str(Growth(**growth))
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        told = ", ".join(f"{key} {n}" for key, n in value.items()) if isinstance(value, dict) else value
        print(f"{name:{width}}  {told}")


def options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--seconds", type=positive, default=600, metavar="S", help="seconds of load")
    parser.add_argument("--method", choices=METHODS, default="draft_model", help="speculation method")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a target of your own, with --draft and --kv-cache-bytes (default: a tiny Llama)",
    )
    add_shared(
        parser.add_argument,
        "--draft",
        dest="draft_model",
        metavar="MODEL",
        help="a drafter of your own (default: a tiny one)",
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=positive,
        metavar="N",
        help="bytes of KV cache, few enough for preemption (default: by model)",
    )
    parser.add_argument(
        "--requests", type=positive, default=44, metavar="N", help="number of requests whose answers are compared"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    given: argparse.Namespace = parser.parse_args()
    if given.model and not given.kv_cache_bytes:
        parser.error("--model needs --kv-cache-bytes")
    if given.model and METHODS[given.method].model is not None and not given.draft_model:
        parser.error(f"--model with --method {given.method} needs --draft")
    return given


def main() -> int:
    given = options()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(given, Path(folder))
        soak.run()
    show(soak.figures)
    for problem in soak.problems:
        print(f"FAILED  {problem}")
    if given.json:
        given.json.write_text(json.dumps(soak.figures | {"problems": soak.problems}, indent=1) + "\n")
    print("all of it held" if not soak.problems else f"{len(soak.problems)} of it did not hold")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
