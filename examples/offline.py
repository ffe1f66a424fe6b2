"""Without a server: a model's output with drafts, and how many of its tokens were drafts.

.venv/bin/python examples/offline.py [--model MODEL --speculative-config JSON]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_gaudi_spec.tools.demo_model import demo_model_path

PROMPTS = ["The capital of France is", "The future of AI is", "Python 3.11 brings improvements to its"]
# Any model may draft for any other, whatever their tokens are: this one has 29 % of the demo model's tokens.
UNIVERSAL: dict[str, Any] = {
    "method": "universal_draft",
    "model": str(Path(__file__).parents[1] / "demo" / "draft-other-vocab"),
    "num_speculative_tokens": 3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id (default: the demo model)")
    parser.add_argument("--speculative-config", type=json.loads, default=UNIVERSAL, help="default: universal_draft")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer")
    options = parser.parse_args()

    llm = LLM(
        model=options.model or demo_model_path(),
        speculative_config=options.speculative_config,
        max_model_len=1024,
        max_num_seqs=len(PROMPTS),
        disable_log_stats=False,  # for the counters below
    )
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    answers = llm.generate(PROMPTS, params)
    for answer in answers:
        print(f"\n{answer.prompt!r}\n  {answer.outputs[0].text!r}")

    num_tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafted, accepted = (counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    print(f"\n{num_tokens} tokens; {drafted} were drafted, {accepted} of them accepted")


if __name__ == "__main__":
    main()
