"""Draft with a model whose tokenizer differs from the target's and count the accepted draft tokens.

.venv/bin/python examples/universal_drafting.py [--model TARGET --draft DRAFTER]
"""

import argparse
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_gaudi_spec.tools.demo_model import demo_model_path

DRAFTER = Path(__file__).parents[1] / "demo" / "draft-other-vocab"
QUESTIONS = ["What is photosynthesis?", "Why is the sky blue?", "What is an operating system?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id of the target (default: the demo model)")
    parser.add_argument("--draft", default=str(DRAFTER), help="the same for the drafter (default: draft-other-vocab)")
    parser.add_argument("--max-tokens", type=int, default=48, help="maximum length of each answer")
    options = parser.parse_args()

    llm = LLM(
        model=options.model or demo_model_path(),
        speculative_config={"method": "universal_draft", "model": options.draft, "num_speculative_tokens": 3},
        max_model_len=1024,
        max_num_seqs=len(QUESTIONS),
        disable_log_stats=False,  # for the metrics below
    )
    chats: Any = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    answers = llm.chat(chats, params, use_tqdm=False)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"\n{question}\n  {answer.outputs[0].text!r}")

    metrics = llm.get_metrics()
    for metric in metrics:
        if metric.name == "gaudi_spec:vocabulary_coverage":
            print(f"\n{metric.value:.0%} of the {metric.labels['vocabulary']}'s tokens have a counterpart", end="")
    counters = {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}
    drafted, accepted = (counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    num_tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    print(f"\n{num_tokens} tokens; {drafted} were drafted, {accepted} of them accepted")


if __name__ == "__main__":
    main()
