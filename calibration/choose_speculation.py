"""Find out how far to speculate: `gaudi-spec tune` under the name that it has beside the steps of a calibration.

python calibration/choose_speculation.py MODEL --draft draft_model=DRAFTER --draft eagle=HEAD --batches 1 4 16
"""

import sys

from vllm_gaudi_spec.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
