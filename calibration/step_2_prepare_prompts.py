"""Step 2: choose the prompts to measure with.

The default is a built-in set of many kinds of text. A .jsonl file has a string, or an object with a "prompt", "text" or
"question", on each line; a .txt file has a prompt on each line; in a folder, each .txt file is a prompt. Any other name
is that of a Hugging Face data set, NAME or NAME:SPLIT, which needs the package `datasets`.
"""

import sys
from pathlib import Path

from fp8_calibration.folder import Folder, run_step, write_prompts
from vllm_gaudi_spec.tools.io.command_line import Parser, positive
from vllm_gaudi_spec.tools.io.prompts import SOURCES, load_prompts


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of this calibration")
    add("--prompts", metavar="SOURCE", help=f"{SOURCES} (default: a built-in set)")
    add("--limit", type=positive, metavar="N", help="use the first N prompts (default: all; 512 of a data set)")
    add("--chat", metavar="MODEL", help="apply the chat template of this model to each prompt")
    options = parser.parse_args()

    def step() -> None:
        prompts = load_prompts(options.prompts, options.limit)
        if options.chat:
            from vllm.tokenizers import get_tokenizer

            apply = get_tokenizer(options.chat).apply_chat_template
            turns = [[{"role": "user", "content": text}] for text in prompts]
            prompts = [apply(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
        folder = Folder(options.out)
        write_prompts(folder, prompts)
        print(f"{len(prompts)} prompts in {folder.prompts}")

    return run_step("step 2", step)


if __name__ == "__main__":
    sys.exit(main())
