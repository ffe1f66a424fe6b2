"""Options, subprocesses, memory bandwidth, and output, shared by all benchmarks."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.tools.io.command_line import add_shared

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".bench"
NOISE_NOTE = "This machine may be shared and noisy: read the ratios, not the absolute figures."

QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def check_platform(expected: str, chosen: str | None = None) -> None:
    """Reject any platform other than this one. `chosen` is the module of vLLM's platform, if the caller knows it."""
    if chosen is None:
        from vllm.platforms import current_platform

        chosen = type(current_platform).__module__
    if chosen.startswith("vllm_gaudi_spec") != (expected == "ours"):
        raise RuntimeError(f"wanted the platform {expected}, vLLM chose {chosen}")


def log(text: str) -> None:
    print(text, flush=True)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def add_num_drafts(parser: argparse.ArgumentParser, dest: str, default: int | list[int]) -> None:
    """Add an option for the number of drafts, which takes several values if its default has several."""
    several = isinstance(default, list)
    add_shared(
        parser.add_argument,
        "--num-speculative-tokens",
        dest=dest,
        type=int,
        default=default,
        nargs="+" if several else None,
        metavar="K",
        help="numbers of drafts per step" if several else "drafts per step",
    )


def add_output_len(parser: argparse.ArgumentParser, default: int) -> None:
    add_shared(
        parser.add_argument,
        "--output-len",
        dest="tokens",
        type=int,
        default=default,
        metavar="N",
        help="number of tokens to generate per prompt; end tokens are ignored",
    )


# ---- subprocesses --------------------------------------------------------------------------------------


def run_part(program: str, part: list[str], *, log_name: str, environment: dict[str, str], seconds: float) -> Any:
    """Run `program` with the arguments `part` in a separate process, and return its result.

    The child process also gets `--result FILE` and `--started TIME` and writes its result to the file as JSON (see
    `hand_back`). Its output is written to .bench/LOG.log. If the process fails, the end of this log is shown and
    RuntimeError is raised.
    """
    # Otherwise, a parent process that is stopped would leave its child process running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    LOGS.mkdir(exist_ok=True)
    log_path = LOGS / f"{log_name}.log"
    with tempfile.TemporaryDirectory() as folder, log_path.open("w") as log_file:
        result = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            program,
            *part,
            "--result",
            str(result),
            "--started",
            repr(time.time()),
        ]
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"no end after {seconds:.0f} s"
        finally:
            end_group(child)
        if code == 0:
            return json.loads(result.read_text())
    log("".join(log_path.read_text(errors="replace").splitlines(keepends=True)[-20:]))
    raise RuntimeError(f"{' '.join(part)} failed ({code}); its last lines stand above, all of them in {log_path}")


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the child, because an engine that outlives it would disturb the next measurement."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def hand_back(result: Path, answer: Any) -> None:
    result.write_text(json.dumps(answer))


# ---- the machine ---------------------------------------------------------------------------------------


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first core, or 64 MiB if the kernel does not report it."""
    sizes = [64 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]]
        sizes.append(int(text[:-1]) * unit)
    return max(sizes)


def read_bandwidth(repeats: int = 7) -> float:
    """Return the bytes per second that all threads together read from memory, the best of several measurements."""
    import torch

    num_bytes = max(1 << 30, 16 * last_level_cache_bytes())
    columns = 1024
    matrix = torch.ones(num_bytes // 4 // columns, columns)
    vector = torch.ones(columns)
    best = float("inf")
    for _ in range(repeats):
        for read in (matrix.sum, lambda: torch.mv(matrix, vector)):
            started = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - started)
    return matrix.nbytes / best


def warn_if_busy() -> None:
    """Warn if other processes have used the cores during the last minute."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        log(f"warning: the load average is {load:.1f} on {cores} cores: other work runs and will show in the figures")


def describe_machine() -> dict[str, Any]:
    import torch

    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "threads": len(os.sched_getaffinity(0)), "torch": torch.__version__}


# ---- the model -----------------------------------------------------------------------------------------


def model_folder(model: str) -> Path:
    """Return the folder of a model, which is downloaded if `model` is a Hugging Face ID."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


def kv_bytes_per_token(folder: Path, bytes_per_value: int) -> int:
    config = json.loads((folder / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(head_size) * bytes_per_value


# ---- output --------------------------------------------------------------------------------------------


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_rows(
    options: argparse.Namespace, settings: Iterable[str], rows: list[Any], machine: Any = None, **more: Any
) -> None:
    """Write result rows to the file given by --json, with the options named in `settings`."""
    used_settings = {name: getattr(options, name) for name in settings}
    write_json(options.json, {**used_settings, **more, "rows": rows, "machine": machine or describe_machine()})


def write_json(path: Path | None, report: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")
        log(f"written to {path}")
