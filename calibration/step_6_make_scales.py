"""Step 6: make scales in the files that Intel Neural Compressor reads, and a QUANT_CONFIG for each method: maxabs_hw
(scales that the matrix engine applies for free), maxabs_pow2 (any power of two), maxabs_arbitrary, and two methods with
a scale for each output channel of a weight.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

from fp8_calibration.folder import (
    MODEL_OPTIONS,
    Folder,
    read_json,
    read_measurements,
    run_step,
    serving_config,
    write_json,
)
from fp8_calibration.scales import CARDS, SCALE_METHODS, make_scales, supports_method
from fp8_calibration.writing import write_files
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.files import QuantFilesError
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared


def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of this calibration")
    add("--scale-method", action="append", default=[], choices=SCALE_METHODS, help="may be repeated (default: all)")
    add_shared(add, "--card", choices=CARDS, help="make scales for this card (default: the card of step 1)")
    add("--exclude", action="append", default=[], metavar="REGEX", help="modules that stay in high precision")
    add("--model", help="check that the target's measurements are for this model")
    add_shared(add, "--draft", help="check that the drafter's measurements are for this model")
    options = parser.parse_args()

    def step() -> None:
        folder = Folder(options.out)
        roles = folder.roles
        card = options.card or str(read_json(folder.device).get("card"))
        if card not in CARDS:
            raise QuantFilesError(f"{folder.device} names no card ({card}); run step 1 again, or pass --card")
        done = {}
        for name in roles:  # all are read and checked before one is written
            prefix = folder.role(name).final
            model = getattr(options, MODEL_OPTIONS[name])
            ranks = [read_measurements(prefix, world, model) for world in sorted(files.find_ranks(prefix)) or [1]]
            included = [[without(record, options.exclude) for record in records] for records in ranks]
            methods = options.scale_method or [one for one in SCALE_METHODS if supports_method(included[0][0], one)]
            scales = {
                method: [made for records in included for made in make_scales(records, method, card)]
                for method in methods
            }
            first = ranks[0][0]
            done[name] = scales, [module for module in first.looked_at if module not in first.nodes]
        for name, (scales, unseen) in done.items():
            role = folder.role(name)
            for method, records in scales.items():
                for record in records:
                    write_files(role.final, record, method)
                path = role.quant_config(method)
                write_json(path, serving_config(role.final, method, options.exclude, unseen))
                print(f"{name}: {len(records[0].nodes)} modules, {card}, {method}: QUANT_CONFIG={path}")
            for method in [] if options.scale_method else [one for one in SCALE_METHODS if one not in scales]:
                print(f"{name}: weights were measured per tensor, so there is no {method}")

    return run_step("step 6", step)


def without(record: files.Record, patterns: list[str]) -> files.Record:
    nodes = {k: v for k, v in record.nodes.items() if not any(re.search(pattern, k) for pattern in patterns)}
    return replace(record, nodes=nodes)


if __name__ == "__main__":
    sys.exit(main())
