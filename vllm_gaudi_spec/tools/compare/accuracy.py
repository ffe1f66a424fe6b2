"""GSM8K through lm-eval.

Neither lm-eval nor its data come with this project, and this has not been tried with them.
"""

from __future__ import annotations

from typing import Any

from vllm_gaudi_spec.tools.compare.measure import Setup

TASK = "gsm8k"
QUESTION_TOKENS = 2048  # five worked examples and a question


def gsm8k_accuracy(setup: Setup, config: dict[str, Any] | None, limit: int | None) -> float:
    """The share of questions whose last number is the right one. Loads an engine of its own."""
    from lm_eval import simple_evaluate

    engine = setup.engine_options(config)
    options = {
        "pretrained": engine.pop("model"),
        "batch_size": "auto",
        **engine,
        "max_model_len": QUESTION_TOKENS + setup.osl,
    }
    if config is None:
        del options["speculative_config"]
    try:
        found = simple_evaluate(model="vllm", model_args=options, tasks=[TASK], limit=limit)
    except (OSError, ConnectionError) as error:
        raise ValueError(f"GSM8K is not to be had here ({error}); leave out --accuracy-rate") from error
    return float(found["results"][TASK]["exact_match,flexible-extract"])
