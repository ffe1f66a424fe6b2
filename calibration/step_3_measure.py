"""Step 3: run the prompts, and measure the largest value of every layer of the target and its drafter.

It starts the engine that will serve the models, with a QUANT_CONFIG in mode MEASURE. After an interruption, it
continues after the last chunk of prompts when it is run again with the same options.
"""

import os
import sys
from pathlib import Path

from fp8_calibration.folder import TARGET, Folder, run_step
from fp8_calibration.measure import Run, measure
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared, json_object, positive

TARGET_HEADS = ("mtp",)


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hugging Face id of the target")
    add("--out", type=Path, required=True, help="the folder of this calibration")
    add_shared(
        add,
        "--draft",
        metavar="MODEL",
        help="folder or Hugging Face id of the drafter (default: only the target is measured)",
    )
    add("--method", help="speculation method, as in vLLM (default with --draft: draft_model); mtp needs no --draft")
    add_shared(
        add,
        "--num-speculative-tokens",
        dest="num_drafts",
        type=positive,
        default=3,
        metavar="K",
        help="drafts per step",
    )
    add("--tensor-parallel-size", type=positive, default=1, metavar="N", help="number of ranks")
    add("--batch-size", type=positive, default=8, metavar="N", help="number of prompts in a chunk")
    add("--max-tokens", type=positive, default=32, metavar="N", help="length of answers, in tokens")
    add(
        "--max-prompt-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="maximum length of prompts, in tokens; longer ones are cut",
    )
    add("--engine", type=json_object, default={}, metavar="JSON", help="additional options for vllm.LLM")
    add("--fresh", action="store_true", help="delete earlier measurements in this folder")
    add("--verbose", action="store_true", help="show the traceback of an error")
    options = parser.parse_args()
    method = options.method or ("draft_model" if options.draft else None)
    if method and not options.draft and method not in TARGET_HEADS:
        parser.error(f"--method {method} needs --draft")
    folder = Folder(options.out.absolute())
    run = Run(
        model=options.model,
        draft=options.draft,
        method=method,
        num_drafts=options.num_drafts,
        world=options.tensor_parallel_size,
        batch_size=options.batch_size,
        max_tokens=options.max_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        engine=options.engine,
    )

    def step() -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["QUANT_CONFIG"] = str(folder.role(TARGET).measure_config)
        print(f"{measure(folder, run, fresh=options.fresh)} prompts measured")

    return run_step("step 3", step, verbose=options.verbose)


if __name__ == "__main__":
    sys.exit(main())
