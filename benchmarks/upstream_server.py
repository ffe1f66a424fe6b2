"""This platform beside upstream's CPU platform through the server: `vllm bench serve` to one of each.

python benchmarks/upstream_server.py --json .bench/upstream_server.json
python benchmarks/upstream_server.py --size tiny --input-len 32 --output-len 8 --turns 2 --max-concurrency 2    # a try

Both servers live side by side and take turns, upstream's eagerly. The model has the given shape and random weights of
bfloat16, served in float32 without drafts; prompts are random, and none is found in a cache. The tokenizer is the demo
model's.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import common
import dummy
import speculation_common as shared
import torch
from common import PLATFORMS, QUIET
from turns import interval, ratio, take
from upstream_shapes import NO_RESERVE, SIZES

from vllm_gaudi_spec.tools.demo_model import demo_model_path
from vllm_gaudi_spec.tools.io.command_line import Parser

sys.path.append(str(common.ROOT))
from tests.full_tests.server import Running, free_port, serve_command, serve_environment

# By our names, what `vllm bench serve` calls them, and whether more is better.
FIGURES = {
    "tokens/s": ("output_throughput", True),
    "time to first token, ms": ("median_ttft_ms", False),
    "time per output token, ms": ("median_tpot_ms", False),
}
VOCABULARY = 49152
"""That of the demo model."""
REQUESTS_EACH = 3


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5b", help="the model's shape")
    parser.add_argument(
        "--max-concurrency", type=int, nargs="+", default=[1, 8], metavar="B", help="requests that run together"
    )
    parser.add_argument("--input-len", type=int, default=256, metavar="N", help="tokens of a prompt")
    common.add_output_len(parser, 32)
    parser.add_argument("--all-cores", action="store_true", help="upstream without the core that it keeps free")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="measured turns of each server")
    common.add_json(parser)
    return parser.parse_args()


def start(platform: str, model: str, options: argparse.Namespace) -> Running:
    length, rows = options.input_len + options.tokens + 16, max(options.max_concurrency)
    kv_bytes = 2 * rows * (length + 128) * dummy.kv_bytes(dummy.SIZES[options.size], torch.float32)
    words = [
        *("--tokenizer", demo_model_path(), "--served-model-name", options.size, "--dtype", "float32"),
        *("--max-model-len", str(length), "--max-num-seqs", str(rows), "--kv-cache-memory-bytes", str(kv_bytes)),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]
    environment = QUIET | PLATFORMS[platform]
    if platform == "upstream":
        words.append("--enforce-eager")
        environment |= NO_RESERVE if options.all_cores else {}
    common.log(f"starting {platform} ...")
    port = free_port()
    command = serve_command(model, "--host", "127.0.0.1", "--port", str(port), *words)
    log = common.LOGS / f"upstream_server-{platform}.log"
    return Running(command, port, log, serve_environment(**environment))


def check_platform(platform: str, server: Running) -> None:
    is_upstream = "[cpu_model_runner.py:" in server.log.read_text()  # its runner loads the model
    if is_upstream != (platform == "upstream"):
        raise RuntimeError(f"wanted the platform {platform}; see {server.log}")


def bench(server: Running, *, concurrency: int, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "openai"),
            *("--base-url", f"http://127.0.0.1:{server.port}", "--model", options.size),
            *("--tokenizer", demo_model_path(), "--dataset-name", "random", "--seed", "0", "--disable-tqdm"),
            *("--random-input-len", str(options.input_len), "--random-output-len", str(options.tokens)),
            *("--num-prompts", str(REQUESTS_EACH * concurrency), "--max-concurrency", str(concurrency)),
            *("--num-warmups", "1", "--ignore-eos", "--temperature", "0"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        log = common.LOGS / "upstream_server-bench.log"
        with log.open("w") as out:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=900).returncode
        if code:
            raise RuntimeError(f"vllm bench serve: status {code}; see {log}")
        found = json.loads((Path(folder) / "result.json").read_text())
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} requests failed; see {log}")
    return {name: float(found[key]) for name, (key, _) in FIGURES.items()}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    common.LOGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        model = dummy.write_model(Path(folder), options.size, vocab_size=VOCABULARY, tie_word_embeddings=True)
        dummy.write_weights(model)
        servers = {}
        for platform in PLATFORMS:
            servers[platform] = start(platform, model, options)
            started.callback(servers[platform].end)
            check_platform(platform, servers[platform])
        rows = []
        for concurrency in options.max_concurrency:
            turns = take(servers, options.turns, partial(bench, concurrency=concurrency, options=options))
            rows += [row_of(name, concurrency, turns) for name in FIGURES]
    return rows


def row_of(name: str, concurrency: int, turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    values = [{platform: found[name] for platform, found in turn.items()} for turn in turns]
    row = {
        "what": name,
        "concurrency": concurrency,
        "values": {platform: median(turn[platform] for turn in values) for platform in PLATFORMS},
        # How many times as good ours is.
        "ratio": ratio(values, *(("upstream", "ours") if FIGURES[name][1] else ("ours", "upstream"))),
    }
    common.log(f"   {name}, concurrency {concurrency}: {row['values']}, {interval(row['ratio'])}")
    return row


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    lines = [
        [
            *(options.size, row["what"], str(row["concurrency"])),
            *(f"{row['values'][platform]:.1f}" for platform in PLATFORMS),
            interval(row["ratio"]),
        ]
        for row in rows
    ]
    common.log(f"\nprompts of {options.input_len}, {options.tokens} tokens, float32, {options.turns} turns each\n")
    common.log(shared.markdown(["shape", "figure", "concurrency", "ours", "upstream's", "ratio"], lines))
    common.log(f"\n{common.NOISE_NOTE}")


def measure_all(options: argparse.Namespace) -> None:
    common.warn_if_busy()
    rows = measure(options)
    show(rows, options)
    common.write_rows(options, ("size", "input_len", "tokens", "turns", "all_cores"), rows)


def main() -> int:
    # Else a benchmark that is stopped would not wait for its servers to end, and leave its client running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = parse_options()
    return shared.run_whole(lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
