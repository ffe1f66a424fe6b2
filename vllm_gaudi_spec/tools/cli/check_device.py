"""The part of selftest that opens the device, in a process whose environment `selftest.start` has set."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.tools.cli import make_parser
from vllm_gaudi_spec.tools.io import output

if TYPE_CHECKING:
    from vllm_gaudi_spec.self_test.result import Result

_STYLES = {"passed": "green", "failed": "bold red", "not checked": "cyan"}


def main() -> int:
    options = make_parser().parse_args()
    return output.guarded("selftest", lambda: checked(options), verbose=options.verbose)


def checked(options: argparse.Namespace) -> int:
    try:
        result = check(options.dtype)
    except ModuleNotFoundError:  # `guarded` has the remedy
        raise
    except Exception as error:
        if options.verbose:
            raise
        return output.fail("selftest", f"{in_one_line(error)} (--verbose shows where)", output.PROBLEMS)
    if options.json != output.STDOUT:
        show(result)
    output.write_json(result.as_json(), options.json)
    return output.PROBLEMS if result.failed else output.FINE


def check(dtype: str) -> Result:
    import torch
    from vllm.platforms import current_platform

    from vllm_gaudi_spec.devices import load_backend, refuse_unknown_device
    from vllm_gaudi_spec.platforms.base import is_active
    from vllm_gaudi_spec.self_test.run import self_test

    refuse_unknown_device()
    if not is_active():
        raise ValueError("vLLM runs on another platform plugin; set VLLM_PLUGINS to gaudi_spec, or set VGS_DEVICE")
    backend = load_backend()
    # As a worker does before it loads a model.
    current_platform.set_device(torch.device(backend.traits.torch_device.type, 0))
    current_platform.import_kernels()
    return self_test(backend, getattr(torch, dtype))


def show(result: Result) -> None:
    if sys.stdout.isatty():
        rows = [
            (check.status, check.name, check.detail + (f"\n→ {check.advice}" if check.advice else ""))
            for check in result.checks
        ]
        output.show_table(("", "check", "measured"), rows, styles=_STYLES, numbers=False)
    else:
        for check in result.checks:
            print(f"{check.status:<12} {check.name:<17} {check.detail}")
            if check.advice:
                print(f"{'':<30} -> {check.advice}")
    outcome = f"{len(result.failed)} failed" if result.failed else result.summary()
    print(f"\n{result.device}, mode {result.mode}, {result.dtype}: {outcome}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
