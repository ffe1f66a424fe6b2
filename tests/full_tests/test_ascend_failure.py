"""On the emulated Ascend NPU: an operator that fails on the card ends the engine, with its name; nothing waits for it.

Runs with VGS_DEVICE=ascend-emulated; the engine that ends is in a process of its own.
"""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ascend, pytest.mark.slow]

SERVED = """
import os, sys, time, torch
from vllm import LLM, SamplingParams, TokensPrompt
async_scheduling = sys.argv[2] == "async"
llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=128,
          kv_cache_memory_bytes=16 << 20, async_scheduling=async_scheduling,
          speculative_config={"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3})
engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
engine.add_request("one", TokensPrompt(prompt_token_ids=[3, 4, 5] * 8), params)
for _ in range(4):
    engine.step()
rows = torch.zeros(4, 2, device="npu")
rows.index_select(0, torch.tensor([9], device="npu"))
for attempt in range(3):
    began = time.monotonic()
    try:
        answers = [engine.step() for _ in range(20)]
        print("answered" if any(answers) else "nothing")
    except Exception as error:
        print("raised", time.monotonic() - began < 30)
os._exit(0)
"""


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_an_operator_that_fails_ends_the_engine(looping_llama: str, scheduling: str) -> None:
    """In the step after it. Later steps get the error, or nothing where vLLM counts the request as under way."""
    child = subprocess.run(
        [sys.executable, "-u", "-c", SERVED, looping_llama, scheduling],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    said = [line for line in child.stdout.splitlines() if line.startswith(("raised", "answered", "nothing"))]
    assert len(said) == 3, child.stdout[-2000:] + child.stderr[-2000:]
    assert said[0] == "raised True"
    assert set(said) <= {"raised True", "nothing"}
    assert "aclnnIndexSelect: index out of range" in child.stderr
