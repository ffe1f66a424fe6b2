"""Step 5: put the measurements of tensor-parallel ranks together, and write them for the ranks that will serve.

All ranks get the same ranges, those that one rank would have measured. With --from and --to it works on measurements of
any folder, given as QUANT_CONFIG's dump_stats_path gives them, without _hooks_maxabs and what follows.
"""

import sys
from pathlib import Path

from vllm_gaudi_spec.tools.calibration.folder import Folder
from vllm_gaudi_spec.tools.calibration.steps import exit_status, unify_ranks
from vllm_gaudi_spec.tools.io.command_line import Parser, positive


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="the folder of this calibration")
    add("--from", type=Path, dest="source", metavar="PREFIX", help="instead: measurements to read")
    add("--to", type=Path, dest="destination", metavar="PREFIX", help="and where to write them")
    add("--world-size", type=positive, metavar="N", help="ranks that will serve (default: as many as measured)")
    add("--measured-world-size", type=positive, metavar="N", help="which measurements, where there are several")
    add("--model", help="make sure that the target's measurements, or those of --from, are of this model")
    options = parser.parse_args()
    if (options.out is None) == (options.source is None) or (options.source is None) != (options.destination is None):
        parser.error("give --out, or --from and --to")

    def step() -> None:
        if options.source is not None:
            pairs = [(options.source, options.destination)]
        else:
            folder = Folder(options.out)
            pairs = [(folder.role(name).processed, folder.role(name).final) for name in folder.roles]
        unify_ranks(pairs, options.world_size, options.measured_world_size, options.model)

    return exit_status("step 5", step)


if __name__ == "__main__":
    sys.exit(main())
