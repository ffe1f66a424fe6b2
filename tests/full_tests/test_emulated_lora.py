"""LoRA adapters on an emulated card: loaded, mixed and driven out after warm-up, and nothing is compiled for it.

Runs with VGS_DEVICE=hpu-emulated or ascend-emulated in a process of its own: the emulated card changes torch for good.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests import adapters
from tests.full_tests.adapters import LORA, Merged, greedy, run
from tests.full_tests.captured import captured, programs_are_the_manifest
from tests.full_tests.engines import engine
from tests.full_tests.prompts import random_prompts
from tests.full_tests.ranks import ranks_agree
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.tiny_models import VOCAB

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("own_cache")]

# Few rows and chunks: each size is a program, or several.
SIZES: dict[str, Any] = dict(max_num_seqs=3, max_model_len=256, max_num_batched_tokens=128)


def test_adapters_compile_nothing_after_warm_up(looping_llama: str, tmp_path: Path) -> None:
    made = [
        adapters.make(looping_llama, tmp_path / "a", 1, rank=4),
        adapters.make(looping_llama, tmp_path / "b", 2, rank=8),
        adapters.make(looping_llama, tmp_path / "c", 3, rank=8, modules=adapters.ATTENTION),
    ]
    jobs = [job for adapter in (*made, None) for job in greedy(random_prompts([5, 140], VOCAB), adapter)]
    random.Random(0).shuffle(jobs)
    before = captured()
    config = dict(ngram(2), method="ngram_gpu")
    with speculating(looping_llama, config, **LORA, **SIZES) as llm:  # which checks, when it ends, what was compiled
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        programs_are_the_manifest(llm, before)
        assert llm.llm_engine.list_loras() == set()
        outputs = run(llm, jobs)
        assert llm.llm_engine.add_lora(made[0].request())
        assert run(llm, jobs[:3]) == outputs[:3]
        assert accepted(llm) > 5
        total = llm.collective_rpc("step_report")[0]["device"]["emulator"]["total"]
        assert (total["dynamic_ops"], total["fallbacks"]) == (0, 0)
    Merged(looping_llama, tmp_path).check(jobs, outputs)


@pytest.mark.slow
def test_adapters_on_two_cards(looping_llama: str, tmp_path: Path) -> None:
    """Each rank has its part of an adapter, and adds up its part of sums: texts are held against the merged model's,
    where ties are known."""
    made = [adapters.make(looping_llama, tmp_path / name, number) for number, name in ((1, "a"), (2, "b"))]
    jobs = [job for adapter in (*made, None) for job in greedy(random_prompts([5, 60], VOCAB), adapter)]
    with engine(looping_llama, **LORA, **SIZES, tensor_parallel_size=2) as llm:
        outputs = run(llm, jobs)
        ranks_agree(llm, 2)
    Merged(looping_llama, tmp_path).check(jobs, outputs)
