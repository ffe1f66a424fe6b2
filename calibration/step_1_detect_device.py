"""Step 1: note the device, and which card the scales are for.

Gaudi 2 and Gaudi 3 hold different ranges in FP8, so scales are made for one of them. On a machine without a Gaudi the
card is the one that is named; without a name it is a Gaudi 2, whose range is the smaller one.
"""

import sys
from pathlib import Path

from vllm_gaudi_spec.tools.calibration.folder import Folder
from vllm_gaudi_spec.tools.calibration.scales import CARDS
from vllm_gaudi_spec.tools.calibration.steps import detect_device, exit_status
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of this calibration")
    add_shared(
        parser.add_argument, "--card", choices=CARDS, help="make scales for this card (default: the one that is there)"
    )
    options = parser.parse_args()
    return exit_status("step 1", lambda: detect_device(Folder(options.out), options.card))


if __name__ == "__main__":
    sys.exit(main())
