"""An engine on a torch that has Intel's version string, and loads the card by itself, as in Intel's image. torch's code
is this environment's: only comparisons change."""

import json
import os
from pathlib import Path

import pytest

from tests.full_tests.reference import Reference
from tests.support.autoload import write_bridge
from tests.support.processes import python_path, run_code

pytestmark = pytest.mark.emulated

VENDOR = "2.13.0a0+git009b5f6"
"""In the form of that of Intel's image for 1.24.1. A pre-release: for comparisons it comes before 2.13.0."""
PROMPT, NUM_TOKENS = [5, 6, 7, 5, 6], 12

_ENGINE = """
import json, sys
import torch

loaded = torch.accelerator.is_available()
from torch.torch_version import TorchVersion

torch.__version__ = torch.version.__version__ = TorchVersion(sys.argv[2])

from vllm import LLM, SamplingParams
from vllm.utils.torch_utils import is_torch_equal_or_newer

speculation = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1, prompt_lookup_max=3)
sizes = dict(max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64, num_gpu_blocks_override=8)
llm = LLM(sys.argv[1], dtype="float32", speculative_config=speculation, skip_tokenizer_init=True, **sizes)
params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1)
(answer,) = llm.generate([{"prompt_token_ids": json.loads(sys.argv[3])}], params)
(report,) = llm.collective_rpc("step_report")
found = {
    "is_newer": is_torch_equal_or_newer("2.13.0"),
    "tokens": list(answer.outputs[0].token_ids),
    "loaded_by_torch": loaded,
    "compiled": report["device"]["compiled_after_warmup"],
}
print("\\n" + json.dumps(found))
"""


def test_s15_a_torch_with_the_vendors_version(looping_llama: str, tmp_path: Path) -> None:
    metadata = tmp_path / f"torch-{VENDOR}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {VENDOR}\n")
    write_bridge(tmp_path)
    environment = {"PYTHONPATH": python_path(tmp_path), "VGS_DEVICE": "hpu-emulated", "PT_HPU_LAZY_MODE": "1"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "XDG_CACHE_HOME": str(tmp_path)}
    arguments = [looping_llama, VENDOR, json.dumps(PROMPT)]
    done = run_code(_ENGINE, *arguments, env=os.environ | environment, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    # vLLM may log there when the engine ends.
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["is_newer"] is False
    assert found["loaded_by_torch"]
    assert found["tokens"] == Reference(looping_llama).greedy(PROMPT, NUM_TOKENS)
    assert found["compiled"] == 0
