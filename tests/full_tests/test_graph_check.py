"""`gaudi-spec graph-check` says clean of what is clean, and names the line of what is not."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.processes import run

ROOT = Path(__file__).parents[2]
THIS_FILE = Path(__file__).name
SMALL = ("--dtype", "float32", "--max-num-seqs", "4")


class ReadingDrafter:
    """A drafter of the user's, as careless as one written for another device may be."""

    def __init__(self, vllm_config: Any) -> None:
        """Upstream's interface."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        lengths = torch.from_numpy(num_tokens_no_spec).to("hpu")
        long = lengths[lengths > 4]  # a boolean mask: its result has a size that only the device knows
        guess = int(long.sum().item()) % 100
        return [[guess, guess] for _ in sampled_token_ids]


def test_clean_engine_is_reported_clean(tiny_llama: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    drafter = {"method": "draft_model", "model": tiny_llama, "num_speculative_tokens": 2}
    options = (*SMALL, "--max-model-len", "256", "--requests", "4", "--json", str(file))
    status, said = graph_check(tiny_llama, *options, speculation=drafter)
    assert status == 0, said
    assert said.strip().splitlines()[-1].startswith("clean: "), said
    result = json.loads(file.read_text())
    mixed = result["phases"]["mixed"]
    assert (mixed["compiles"], mixed["max_syncs_in_a_step"], mixed["fallbacks"], mixed["garbage_reads"]) == (0, 1, 0, 0)
    assert mixed["steps"] >= mixed["host_syncs"] > 4
    assert mixed["kv_bytes_read"] > 0
    assert result["graphs"]["captured"] > result["graphs"]["never_used"]


def test_drafter_that_waits_for_the_device_is_named_by_line(tiny_llama: str, tmp_path: Path) -> None:
    """Outside graphs: a boolean mask and .item() in a drafter on the host."""
    file = tmp_path / "result.json"
    name = f"{ReadingDrafter.__module__}.{ReadingDrafter.__qualname__}"
    drafter = {"method": "custom_class", "model": name, "num_speculative_tokens": 2}
    options = (*SMALL, "--max-model-len", "256", "--requests", "6", "--json", str(file))
    status, said = graph_check(tiny_llama, *options, speculation=drafter)
    assert status == 1, said
    mixed = json.loads(file.read_text())["phases"]["mixed"]
    assert mixed["compiles"] > 0
    assert mixed["max_syncs_in_a_step"] > 1
    assert mixed["dynamic_ops"] > 0
    mask, item = (line_of(code) for code in ("long = lengths[", "guess = int("))
    assert places(mixed["dynamic_lines"]) == {mask}
    assert places(mixed["sync_lines"]) >= {mask, item}
    assert places(mixed["compile_lines"]) >= {mask}
    complaints = [line for line in said.splitlines() if line.startswith("not clean: ")]
    assert len(complaints) == 2, said
    assert all(f"{THIS_FILE}:{mask} (propose)" in line for line in complaints), said


def graph_check(*arguments: str, speculation: dict[str, Any]) -> tuple[int, str]:
    """Return the exit status and everything that was printed."""
    words = ["graph-check", *arguments, "--speculative-config", json.dumps(speculation)]
    command = [sys.executable, "-m", "vllm_gaudi_spec.tools.cli", *words]
    # As a user does whose drafter is a class of his own.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run(command, env=environment, timeout=500)
    return done.returncode, done.stdout


def line_of(code: str) -> int:
    """The line of this file that begins so."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(code))


def places(lines: Sequence[dict[str, Any]]) -> set[int]:
    found = (re.search(rf"{THIS_FILE}:(\d+)", line["where"]) for line in lines)
    return {int(match[1]) for match in found if match}
