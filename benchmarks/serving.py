"""Compare this platform's server with upstream's under traffic from `vllm bench serve`.

python -m benchmarks serving --rates 0.5 1 2 inf --json .bench/serving.json
python -m benchmarks serving --rates 1 --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
VGS_DEVICE=cuda python -m benchmarks serving --size 8b --rates 4 8 16 inf    # random weights

Lengths are as in ShareGPT. Servers run side by side and take turns. In a turn, all servers get the same greedy requests
at the same arrival rate and generate past any end token. Other arguments are passed to every server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import common, drafting, dummy
from benchmarks.shared.cells import OUTPUT_TOKENS, PROMPT_TOKENS, draw_lengths, tail
from benchmarks.shared.turns import take
from benchmarks.upstream import DEVICE, OURS, add_against, environments, keep_only
from tests.full_tests.server import Running, serve_command, serve_environment
from tests.support.ports import free_port
from vllm_gaudi_spec.environment import preload_openmp
from vllm_gaudi_spec.metrics import PREFIX
from vllm_gaudi_spec.tools.io.command_line import Parser

FIGURES = (
    *("request_throughput", "output_throughput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"),
)
"""Figures reported by `vllm bench serve`, under its names."""
LONGEST_PROMPT = 1024
"""`vllm bench serve` omits longer ShareGPT prompts."""


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", required=True, metavar="R", help="requests a second, or inf")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="requests of a turn")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="turns of each server and rate")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of lengths, prompts and arrivals")
    parser.add_argument(
        "--max-output-len",
        type=int,
        default=64 if DEVICE == "cpu" else 512,
        metavar="N",
        help="most tokens of an output",
    )
    parser.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        default=(2 if DEVICE == "cpu" else 16) << 30,
        metavar="N",
        help="KV cache of each server, since they share the memory",
    )
    parser.add_argument("--size", choices=dummy.SIZES, help="shape of a model with random weights")
    parser.add_argument("--model", help="Hugging Face id or folder (default: the demo model)")
    add_against(parser)
    common.add_json(parser)
    options, options.server = parser.parse_known_args()
    keep_only(options.against)
    options.rates = [f"{rate:g}" for rate in options.rates]
    return options


def write_requests(file: Path, tokenizer: Any, seed: tuple[int, ...], options: argparse.Namespace) -> None:
    """Write requests in ShareGPT's format. They have about as many tokens as their random lengths."""
    rng = np.random.default_rng(seed)
    texts = drafting.encode(tokenizer, drafting.texts_named("mixed"), bos=False)
    lengths = [
        draw_lengths(rng, histogram, options.requests, most)
        for histogram, most in ((PROMPT_TOKENS, LONGEST_PROMPT - 64), (OUTPUT_TOKENS, options.max_output_len))
    ]
    conversations = [
        [{"value": tokenizer.decode(tail(texts, int(rng.integers(len(texts))), length))} for length in pair]
        for pair in zip(*lengths, strict=True)
    ]
    file.write_text(json.dumps([{"conversations": conversation} for conversation in conversations]))


def bench(server: Running, requests: Path, tokenizer: str, rate: str, seed: int, count: int) -> dict[str, float]:
    """Return the figures that `vllm bench serve` measures with these requests."""
    result = requests.with_name("result.json")
    command = [
        *(
            str(Path(sys.executable).with_name("vllm")),
            "bench",
            "serve",
            "--base-url",
            f"http://127.0.0.1:{server.port}",
        ),
        *("--model", "served", "--tokenizer", tokenizer, "--dataset-name", "sharegpt", "--dataset-path", str(requests)),
        *("--num-prompts", str(count), "--request-rate", rate, "--seed", str(seed), "--num-warmups", "2"),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(result.parent), "--result-filename", result.name),
    ]
    log = common.LOGS / "serving-bench.log"
    with log.open("w") as out:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=1800).returncode
    found = {} if code else json.loads(result.read_text())
    if code or found["failed"] or found["completed"] != count:
        raise RuntimeError(f"`vllm bench serve` failed; see {log} and {server.log}")
    return {figure: float(found[figure]) for figure in FIGURES}


def start(name: str, model: str, words: list[str], environment: dict[str, str]) -> Running:
    common.log(f"starting {name} ...")
    port = free_port()
    command = serve_command(model, "--host", "127.0.0.1", "--port", str(port), *words)
    log = common.LOGS / f"serving-{name.replace(' ', '-').replace(',', '')}.log"
    return Running(command, port, log, serve_environment(**common.QUIET, **environment))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm.tokenizers import get_tokenizer

    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    model = tokenizer = options.model or demo_model_path()
    encoder, rows, device = get_tokenizer(tokenizer), [], dummy.name_device()
    words = [
        *("--served-model-name", "served", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        *("--kv-cache-memory-bytes", str(options.kv_cache_memory_bytes)),
        *(("--gpu-memory-utilization", "0.25") if DEVICE == "cuda" else ()),
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        if options.size:
            # Every token that the model may generate must have a text.
            model = dummy.write_model(Path(folder), options.size, vocab_size=len(encoder))
            words += ["--load-format", "dummy", "--tokenizer", tokenizer]
        servers: dict[str, Running] = {}
        for name, environment in environments().items():
            servers[name] = start(name, model, words + options.server, environment)
            started.callback(servers[name].end)
            if (PREFIX in servers[name].client.get("/metrics").text) != (name == OURS):
                raise RuntimeError(f"{name} runs on another platform; see {servers[name].log}")
        requests = Path(folder) / "requests.json"
        num_turns = Counter[Running]()

        def ask(rate: str, server: Running) -> dict[str, float]:
            num_turns[server] += 1
            write_requests(requests, encoder, (options.seed, num_turns[server]), options)
            return bench(server, requests, tokenizer, rate, options.seed + num_turns[server], options.requests)

        for rate in options.rates:
            turns = take(servers, options.turns, partial(ask, rate))
            for name in servers:
                figures = {figure: median(turn[name][figure] for turn in turns) for figure in FIGURES}
                rows.append({"device": device, "server": name, "rate": rate, **figures})
                common.log(f"   {rate} requests/s, {name}: {figures}")
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    lines = [[row["device"], row["server"], row["rate"], *(f"{row[figure]:.1f}" for figure in FIGURES)] for row in rows]
    common.log("\nmedians over turns\n\n" + common.markdown(["device", "server", "requests/s", *FIGURES], lines))
    common.log(f"\n{common.NOISE_NOTE}")


def measure_all(options: argparse.Namespace) -> None:
    common.warn_if_busy()
    if DEVICE == "cpu":
        preload_openmp()  # also used by upstream's engines
    common.LOGS.mkdir(exist_ok=True)
    rows = measure(options)
    show(rows)
    names = ("rates", "requests", "turns", "seed", "max_output_len", "kv_cache_memory_bytes", "size", "model", "server")
    common.write_rows(options, names, rows, machine=dummy.describe_machine())


def main() -> int:
    options = parse_options()
    return drafting.run_whole(lambda: measure_all(options))
