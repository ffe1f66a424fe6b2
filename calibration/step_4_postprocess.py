"""Step 4: check the measurements of each rank, and adapt them.

Matmuls of attention get the range of the cache that they read. A module that saw no value has no range: that is an
error, or with --allow-unseen a warning, and the module stays in high precision.
"""

import sys
from pathlib import Path

from fp8_calibration.folder import MODEL_OPTIONS, Folder, read_measurements, run_step
from fp8_calibration.scales import postprocess
from fp8_calibration.writing import write_files
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of this calibration")
    add("--model", help="check that the target's measurements are for this model")
    add_shared(add, "--draft", help="check that the drafter's measurements are for this model")
    add("--allow-unseen", action="store_true", help="leave modules that saw no value in high precision")
    options = parser.parse_args()

    def step() -> None:
        folder = Folder(options.out)
        done = {}
        for name in folder.roles:  # all are read and checked before one is written
            records = read_measurements(folder.role(name).measured, None, getattr(options, MODEL_OPTIONS[name]))
            done[name] = [postprocess(record, allow_unseen=options.allow_unseen) for record in records]
        for name, made in done.items():
            for record, _, _ in made:
                write_files(folder.role(name).processed, record)
            record, shared, unseen = made[0]
            print(f"{name}: {len(record.nodes)} modules; {len(shared)} matmuls have the range of their cache")
            for module in unseen:
                print(f"{name}: warning: {module} saw no value and stays in high precision", file=sys.stderr)

    return run_step("step 4", step)


if __name__ == "__main__":
    sys.exit(main())
