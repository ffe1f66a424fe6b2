"""One workload through the vendor's worker and through ours on one emulated card: counts and tokens side by side."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]

_SECONDS = 1800
_TIE = 0.1
"""Two logits in bfloat16 that differ by less may change places."""


class Failed(RuntimeError):
    """A script ended without a result; the message names its log."""


_CYCLE = 8
"""How many tokens follow each other in a circle, where nothing else weighs more."""


def make_checkpoint(folder: Path) -> None:
    """A Llama whose next token is often the one that follows its last token in a circle of a few, and else random: so
    n-grams draft in some steps, and are right in some of those. Its logits are large, so that few lie in a tie."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config)
    token = torch.arange(config.vocab_size)
    before = token - token % _CYCLE + (token - 1) % _CYCLE
    with torch.no_grad():
        embeddings, outputs = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings.mul_(8)
        outputs.add_(0.045 * embeddings[before]).mul_(8)
    model.to(torch.bfloat16).save_pretrained(folder)


def run_script(command: Sequence[str], out: Path, variables: Mapping[str, str]) -> Run:
    """What the script wrote into `out`, its last argument. The command has -P: else a module beside the script would be
    found before those that PYTHONPATH leads to."""
    out.unlink(missing_ok=True)
    with out.with_suffix(".log").open("w") as log:
        try:
            done = subprocess.run(
                [*command, str(out)], env=dict(variables), stdout=log, stderr=subprocess.STDOUT, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(command)} was not done after {_SECONDS} s, see {log.name}") from None
    if done.returncode or not out.is_file():
        raise Failed(f"{' '.join(command)} ended with {done.returncode}, see {log.name}")
    return json.loads(out.read_text())


def serve(python: str, checkpoint: Path, out: Path, variables: Mapping[str, str], ngram: bool) -> Run:
    script = [python, "-P", str(Path(__file__).with_name("workload.py")), str(checkpoint)]
    return run_script([*script, *(["--ngram"] if ngram else [])], out, variables)


Agreement = tuple[int, int, float]


def agreement(checkpoint: Path, run: Run) -> Agreement:
    """(tokens that transformers in bfloat16 prefers over the same text or within a tie, all, the largest gap)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    right, num, largest = 0, 0, 0.0
    for request in run["requests"]:
        prompt, output = request["prompt"], request["output"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        gaps = logits.amax(-1) - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
        right, num, largest = right + int((gaps < _TIE).sum()), num + len(output), max(largest, float(gaps.max()))
    return right, num, largest


def _count_programs(counts: dict[str, int]) -> int:
    return counts["graph_captures"] + counts["lazy_compiles"]


# Ours may have this many times the vendor's.
MOST: dict[str, tuple[float, Callable[[Run], float]]] = {
    # Without a prefix cache, some decode shapes have two graphs: one reads KV in place, the other one gathers it.
    "graphs made in warm-up": (1.7, lambda run: run["warm_up"]["graph_captures"]),
    "programs compiled in warm-up": (1.0, lambda run: _count_programs(run["warm_up"])),
    "launches a step": (1.0, lambda run: run["run"]["launches"] / run["steps"]),
    "bytes moved": (1.0, lambda run: run["run"]["bytes_moved"]),
}


def behind(ours: Run, vendors: Run) -> list[str]:
    """What ours has too much of."""
    return [
        f"{what}: {of(ours):.6g}, more than {times:g} times vllm-gaudi's {of(vendors):.6g}"
        for what, (times, of) in MOST.items()
        if of(ours) > times * of(vendors)
    ]


def _per_step(*names: str) -> Callable[[Run], str]:
    return lambda run: f"{sum(run['run'][name] for name in names) / run['steps']:.2f}"


def _total(name: str, unit: float = 1, form: str = ".0f") -> Callable[[Run], str]:
    return lambda run: format(run["run"][name] / unit, form)


AROUND = (
    "Of vllm-gaudi's worker nothing is changed. Around it: its downloads are not late, although the card is hostile; "
    "the n-gram proposer of its vLLM has larger buffers; its KV cache is marked for the counters."
)

ROWS: dict[str, Callable[[Run], str]] = {
    "engine steps": lambda run: str(run["steps"]),
    "graphs made in warm-up": lambda run: str(run["warm_up"]["graph_captures"]),
    "programs compiled in warm-up": lambda run: str(_count_programs(run["warm_up"])),
    "compiles after warm-up": _total("late_compiles"),
    "copies to the host a step": _per_step("host_reads"),
    "waits for the device a step": _per_step("syncs"),
    "implicit markers a step": _per_step("implicit_markers"),
    "graph replays a step": _per_step("graph_replays"),
    "launches a step": _per_step("launches"),
    "operations outside graphs a step": _per_step("stray_ops"),
    "uploads a step": _per_step("uploads"),
    "uploaded bytes a step": _per_step("upload_bytes"),
    "downloaded bytes a step": _per_step("download_bytes"),
    "KV read, MB": _total("kv_bytes_read", 1e6, ".1f"),
    "bytes moved, MB": _total("bytes_moved", 1e6),
    "flops, G": _total("flops", 1e9, ".2f"),
    "CPU fallbacks, dynamic shapes": lambda run: f"{run['run']['fallbacks']}, {run['run']['dynamic_ops']}",
    "operations given a negative index a step": _per_step("negative_indices"),
}


def tabulate(runs: Mapping[str, Run], agreed: Mapping[str, Agreement]) -> dict[str, Any]:
    """Return the counts as a table of `benchmarks/results`."""
    shown = [f"{num - right} of {num}, gap {gap:.2f}" for right, num, gap in (agreed[name] for name in runs)]
    rows = [[row, *map(show, runs.values())] for row, show in ROWS.items()]
    rows.append(["tokens that are neither transformers' nor tied with them", *shown])
    return {"conditions": AROUND, "columns": ["counted", *runs], "rows": rows}
