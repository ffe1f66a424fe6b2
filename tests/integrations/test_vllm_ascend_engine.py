"""vllm-ascend's own engine: its platform, worker, runner, scheduler and rejection sampler, with real torch_npu over the
emulated CANN, each in a process of its own."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

LENGTH = 24
PROMPTS = [
    "The quick brown fox",
    "seconds go by while",
    "0123456789 bucket by bucket, bucket by",
    "requests wait for one another; who comes late finds nothing left to read. " * 4,  # more than a block
]


def serve(model: str, speculation: dict[str, Any] | None) -> dict[str, Any]:
    asked = {"model": model, "speculation": speculation, "prompts": PROMPTS, "length": LENGTH}
    command = [sys.executable, str(Path(__file__).parent / "engine" / "serve.py"), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def without_drafts(model: str) -> dict[str, Any]:
    return serve(model, None)


def test_texts_are_those_of_transformers(folders: dict[str, str]) -> None:
    found = without_drafts(folders["target"])
    assert found["platform"] == "vllm_ascend.platform"
    assert found["torch_npu"].startswith("2.13.0")
    assert found["launches"] > 1000
    assert found["drafted"] == 0
    model = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folders["target"])
    for prompt, *tokens in zip(PROMPTS, *found["runs"], strict=True):
        read = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected = model.generate(read, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
        assert tokens == [expected[0, read.shape[1] :].tolist()] * 2


# A target of random weights also says ids that are no tokens: nobody drafts those, and its twin reads them as spaces.
@pytest.mark.parametrize(
    ("method", "drafter", "accepted"),
    [
        ("ngram", None, 0.0),
        ("draft_model", "target", 0.9),
        ("universal_draft", "drafter", 0.0),
        ("universal_draft", "twin", 0.5),
    ],
)
def test_texts_are_those_without_drafts(
    method: str, drafter: str | None, accepted: float, folders: dict[str, str]
) -> None:
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if drafter is None:
        speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        speculation["model"] = folders[drafter]
    found, expected = serve(folders["target"], speculation), without_drafts(folders["target"])
    assert found["runs"] == expected["runs"]
    assert found["texts"] == expected["texts"]
    assert found["drafted"] > 0
    assert found["accepted"] >= accepted * found["drafted"]
