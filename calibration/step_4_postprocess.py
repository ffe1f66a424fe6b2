"""Step 4: check the measurements of each rank, and make them fit.

Matmuls of attention get the range of the cache that they read. A module that saw no value has no range: that is an
error, or with --allow-unseen a warning, and it stays in high precision.
"""

import sys
from pathlib import Path

from vllm_gaudi_spec.tools.calibration.folder import DRAFT, TARGET, Folder
from vllm_gaudi_spec.tools.calibration.steps import exit_status, postprocess_measurements
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of this calibration")
    parser.add_argument("--model", help="make sure that the target's measurements are of this model")
    add_shared(parser.add_argument, "--draft", help="make sure that the drafter's measurements are of this model")
    parser.add_argument("--allow-unseen", action="store_true", help="leave modules that saw nothing in high precision")
    options = parser.parse_args()
    models = {name: model for name, model in ((TARGET, options.model), (DRAFT, options.draft)) if model}
    return exit_status(
        "step 4", lambda: postprocess_measurements(Folder(options.out), models, allow_unseen=options.allow_unseen)
    )


if __name__ == "__main__":
    sys.exit(main())
