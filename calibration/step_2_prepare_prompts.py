"""Step 2: choose the prompts that are measured with.

Without --prompts it is a built-in set of many kinds of text. A .jsonl file has a string, or an object with a "prompt",
"text" or "question", on each line; a .txt file has a prompt on each line; in a folder each .txt file is a prompt.
Anything else is the name of a data set of Hugging Face, NAME or NAME:SPLIT, which is then downloaded and needs the
package `datasets`.
"""

import sys
from pathlib import Path

from vllm_gaudi_spec.tools.calibration.folder import Folder
from vllm_gaudi_spec.tools.calibration.steps import exit_status, prepare_prompts
from vllm_gaudi_spec.tools.io.command_line import Parser, positive
from vllm_gaudi_spec.tools.io.prompts import SOURCES


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of this calibration")
    parser.add_argument("--prompts", metavar="SOURCE", help=f"{SOURCES} (default: a built-in set)")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="take the first N (default: all; 512 of a data set)"
    )
    parser.add_argument("--chat", metavar="MODEL", help="ask each prompt in the chat template of this model")
    options = parser.parse_args()
    return exit_status(
        "step 2", lambda: prepare_prompts(Folder(options.out), options.prompts, options.limit, options.chat)
    )


if __name__ == "__main__":
    sys.exit(main())
