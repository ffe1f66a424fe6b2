"""Step 6: make scales of the measurements, in the files that Intel Neural Compressor reads, and a QUANT_CONFIG for each
way of making them: maxabs_hw (scales that the matrix engine applies for free), maxabs_pow2 (any power of two),
maxabs_arbitrary, and two that have a scale for each output channel of a weight.
"""

import sys
from pathlib import Path

from vllm_gaudi_spec.tools.calibration.folder import DRAFT, TARGET, Folder
from vllm_gaudi_spec.tools.calibration.scales import CARDS, SCALE_METHODS
from vllm_gaudi_spec.tools.calibration.steps import exit_status, make_scale_files
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of this calibration")
    add("--scale-method", action="append", default=[], choices=SCALE_METHODS, help="may be repeated (default: all)")
    add_shared(add, "--card", choices=CARDS, help="whose range they fill (default: what step 1 noted)")
    add("--exclude", action="append", default=[], metavar="REGEX", help="modules that stay in high precision")
    add("--model", help="make sure that the target's measurements are of this model")
    add_shared(add, "--draft", help="make sure that the drafter's measurements are of this model")
    options = parser.parse_args()

    models = {name: model for name, model in ((TARGET, options.model), (DRAFT, options.draft)) if model}

    def step() -> None:
        make_scale_files(Folder(options.out), models, options.scale_method, options.card, options.exclude)

    return exit_status("step 6", step)


if __name__ == "__main__":
    sys.exit(main())
