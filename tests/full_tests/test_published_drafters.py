"""Block drafters with configurations of published checkpoints: each loads from its own format, and changes no text."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.full_tests.block_drafters import BlockReference
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.heads import greedy
from tests.full_tests.prompts import random_prompts
from tests.full_tests.published_drafters import PUBLISHED, Block
from tests.full_tests.speculation import accounts, speculating
from tests.full_tests.test_block_drafters import Recorder
from tests.support.marks import quick_and_slow

NUM_TOKENS = 30
LENGTHS = [25, 73, 11, 60, 40, 7]
# Chunked prompts, and windows that texts outgrow.
OPTIONS = dict(max_model_len=128, max_num_batched_tokens=64)
QUICK = ("gpt-oss-20b-DFlash", "Qwen3-4B-speculator.dflash2", "dspark_qwen3_8b_block7")


@pytest.mark.parametrize("name", quick_and_slow(QUICK, PUBLISHED))
def test_published_drafter_changes_no_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = PUBLISHED[name]
    if drafter.is_apart and find_spec("torchvision") is None:
        run_apart(name)
        return
    target, config = drafter.save(tmp_path)
    prompts = random_prompts(LENGTHS, 90)
    params = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        for index in range(len(prompts))
    ]
    with engine(target, **OPTIONS) as llm:
        plain = first_tokens(generate(llm, prompts, params))
    recorder = Recorder(monkeypatch)
    with speculating(target, config, **OPTIONS) as llm:
        outputs = generate(llm, prompts, params)
        assert first_tokens(outputs) == plain
        assert max(drafted for account in accounts(outputs) for drafted in account.drafted) == drafter.num_drafts
        check_logits(llm, drafter, BlockReference(config["model"], target, drafter.read()), recorder)


def run_apart(name: str) -> None:
    """Run the test of a drafter in a process of its own, which can import torchvision."""
    test = f"{__file__}::{test_published_drafter_changes_no_text.__name__}[{name}]"
    lines = (
        "from tests.models import vision",
        "vision.make_importable()",
        "from vllm.model_executor.models import registry",
        # vLLM inspects a model's class in a process of its own, which has no torchvision, and caches the result.
        "registry._run_in_subprocess = lambda function: function()",
        "import pytest, sys",
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {test!r}]))",
    )
    run = [sys.executable, "-c", "\n".join(lines)]
    found = subprocess.run(run, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:]


def check_logits(llm: LLM, drafter: Block, reference: BlockReference, recorder: Recorder) -> None:
    """Check the logits of every block against a dense reference, which reads the same configuration."""
    num_compared = 0
    for prompt in random_prompts([25, 73], 90, seed=1):
        recorder.rounds.clear()
        output = first_tokens(generate(llm, [prompt], greedy(drafter.num_drafts + 6)))[0]
        for length, drafts, logits in recorder.rounds:
            wanted_KV = reference.block_logits([*prompt, *output][:length], drafts)
            torch.testing.assert_close(torch.stack(logits), wanted_KV, atol=1e-3, rtol=1e-3)
            num_compared += 1
    assert num_compared > 2
