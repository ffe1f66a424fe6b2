"""Print a report; a part of spec_decode.py."""

from typing import Any

MOST_TEXTS = 8


def show(report: dict[str, Any]) -> None:
    print(f"\n=== {report['task']} (device {report['device']}, mode {report['mode']}) ===")
    print(f"k {report['k']}, batch size {report['batch_size']}")
    print(f"latency              {report['latency_s']:.2f} s")
    print(f"speed                {report['tokens_per_s']:.1f} tokens/s")
    if report["k"]:
        rate = "no drafts" if report["acc_rate"] is None else f"{report['acc_rate']:.3f}"
        print(f"acc_rate             {rate}")
        print(f"acc_counts           {report['acc_counts']}")
        print(f"mean accepted length {report['mean_accepted_length']:.2f}")
        print(f"num_drafts           {report['num_drafts']}")
        print(f"num_draft_tokens     {report['num_draft_tokens']}")
        print(f"num_accepted_tokens  {report['num_accepted_tokens']}")
    graphs = report["graphs"]
    print(f"graphs               {graphs['warmup']} in warm-up, {graphs['after_warmup']} after it")
    print(f"host syncs per step  {report['host_syncs_per_step']:.2f}")
    if report["matches_baseline"] is not None:
        print("against baseline     " + ", ".join(f"{n} {name}" for name, n in report["matches_baseline"].items()))
    for prompt, text in list(zip(report["prompts"], report["texts"], strict=True))[:MOST_TEXTS]:
        print(f"  {prompt!r}\n    -> {text!r}")
    print(flush=True)
