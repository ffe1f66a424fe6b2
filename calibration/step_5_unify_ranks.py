"""Step 5: combine the measurements of tensor-parallel ranks, and write them for the ranks that will serve.

All ranks get the ranges that a single rank would have measured. With --from and --to, it works on measurements of any
folder, named by QUANT_CONFIG's dump_stats_path, without _hooks_maxabs and what follows.
"""

import sys
from pathlib import Path

from fp8_calibration.folder import Folder, read_measurements, run_step
from fp8_calibration.scales import expand, unify
from fp8_calibration.writing import write_files
from vllm_gaudi_spec.tools.io.command_line import Parser, positive


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="the folder of this calibration")
    add("--from", type=Path, dest="source", metavar="PREFIX", help="instead: measurements to read")
    add("--to", type=Path, dest="destination", metavar="PREFIX", help="and where to write them")
    add("--world-size", type=positive, metavar="N", help="ranks that will serve (default: as many as measured)")
    add("--measured-world-size", type=positive, metavar="N", help="which measurements, if there are several")
    add("--model", help="check that the target's measurements, or those of --from, are for this model")
    options = parser.parse_args()
    if (options.out is None) == (options.source is None) or (options.source is None) != (options.destination is None):
        parser.error("pass --out, or --from and --to")

    def step() -> None:
        pairs = [(options.source, options.destination)]
        if options.out is not None:
            folder = Folder(options.out)
            pairs = [(folder.role(name).processed, folder.role(name).final) for name in folder.roles]
        done = []
        for source, destination in pairs:  # all are read and checked before one is written
            records = read_measurements(source, options.measured_world_size, None if done else options.model)
            done.append((source, destination, len(records), expand(unify(records), options.world_size or len(records))))
        for source, destination, number, made in done:
            for record in made:
                write_files(destination, record)
            print(f"{source}: {number} ranks measured, files for {len(made)}")

    return run_step("step 5", step)


if __name__ == "__main__":
    sys.exit(main())
