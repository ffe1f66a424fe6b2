"""Measure how many of a drafter's tokens the target accepts, and how cheap a draft token must be.

.venv/bin/python examples/measure_drafter.py [--model TARGET --draft DRAFTER --prompts prompts.txt]

For drafters that draft one token at a time, one run at the largest k is enough: the acceptance rate at each position
gives the mean acceptance length for every smaller k. These lengths do not depend on the machine, so you can evaluate a
drafter on a CPU before serving it on a card.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_gaudi_spec.tools.demo_model import demo_model_path

DRAFTER = Path(__file__).parents[1] / "demo" / "draft-same-vocab"
QUESTIONS = [
    "Explain how a bicycle stays upright.",
    "List five uses of a paper clip.",
    "Write a Python function that reverses a list.",
    "Summarize the plot of Romeo and Juliet.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id of the target (default: the demo model)")
    parser.add_argument("--draft", default=str(DRAFTER), help="the same for the drafter (default: draft-same-vocab)")
    parser.add_argument("--method", default="draft_model", help="speculation method (default: draft_model)")
    parser.add_argument("--prompts", type=Path, help="text file with a question on each line (default: four questions)")
    parser.add_argument("-k", type=int, default=5, help="largest number of draft tokens (default: 5)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    parser.add_argument("--max-tokens", type=int, default=96, help="maximum length of each answer (default: 96)")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()

    llm = LLM(
        model=options.model or demo_model_path(),
        speculative_config={"method": options.method, "model": options.draft, "num_speculative_tokens": options.k},
        max_model_len=2048,
        max_num_seqs=8,
        disable_log_stats=False,  # for the metrics below
    )
    questions = options.prompts.read_text().splitlines() if options.prompts else QUESTIONS
    chats: Any = [[{"role": "user", "content": question}] for question in questions if question.strip()]
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=0)
    llm.chat(chats, params, use_tqdm=False)

    metrics: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    rounds = metrics["vllm:spec_decode_num_drafts"].value
    if not rounds:
        raise SystemExit("Nothing was drafted; ask more or longer questions.")
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    rows = []
    print("k  acceptance of position k  mean acceptance length  a draft token may cost")
    for k, count in enumerate(accepted, 1):
        length = 1 + sum(accepted[:k]) / rounds
        rows.append({"k": k, "acceptance": count / rounds, "length": length, "break_even": (length - 1) / k})
        print(f"{k}  {count / rounds:24.0%}  {length:22.2f}  {(length - 1) / k:13.0%} of a step")
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
