"""Step 1: store the device, and the card that the scales are for.

Gaudi 2 and Gaudi 3 have different FP8 ranges, so scales are made for one of them: the card that is named, else that of
this machine, else a Gaudi 2, whose range is smaller.
"""

import sys
from pathlib import Path

from fp8_calibration.folder import Folder, run_step, write_json
from fp8_calibration.scales import CARDS
from vllm_gaudi_spec.config import GAUDI2
from vllm_gaudi_spec.device_table import describe_device, load_backend
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of this calibration")
    add_shared(add, "--card", choices=CARDS, help="make scales for this card (default: the card of this machine)")
    options = parser.parse_args()

    def step() -> None:
        device = describe_device()
        card = options.card or load_backend().weights.fp8_range or GAUDI2
        write_json(Folder(options.out).device, device | {"card": card})
        print(f"{device['device']} ({device['mode']}); scales for {card}")

    return run_step("step 1", step)


if __name__ == "__main__":
    sys.exit(main())
