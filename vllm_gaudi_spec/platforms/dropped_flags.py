"""Options that vLLM 0.32 dropped but deployments still pass to `vllm serve`: they cause a warning, not an error."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_gaudi_spec.devices import choose_device

if TYPE_CHECKING:
    from vllm_gaudi_spec.upstream.platforms import FlexibleArgumentParser

logger = init_logger(__name__)

# Maps a flag to whether it takes a value, and what applies instead.
DROPPED_FLAGS = {
    "--device": (True, "VGS_DEVICE names the device"),
    "--disable-log-requests": (False, "requests are not logged without --enable-log-requests"),
    "--max-seq-len-to-capture": (True, "every length is captured, see additional_config.gaudi_spec"),
    "--num-scheduler-steps": (True, "--async-scheduling does that"),
    "--swap-space": (True, "preempted requests are computed again"),
    "--use-v2-block-manager": (False, "there is one block manager"),
    "--weights-load-device": (True, "a Gaudi's weights are assembled on the host"),
}


class _Ignored(argparse.Action):
    """Log a warning and set nothing. `--device` is refused if it names a different device."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        from vllm.platforms import current_platform

        here = current_platform.device_type
        if option == "--device" and values not in (here, choose_device(), "auto"):
            parser.error(
                f"--device {values} is not the device of this platform, {here}; leave it out, and set VGS_DEVICE"
            )
        logger.warning("%s has no effect and can be left out: %s.", option, self.metavar)


def accept_dropped_flags(parser: FlexibleArgumentParser) -> None:
    """Add the dropped flags that vLLM does not have. Can be called repeatedly."""
    for flag, (takes_value, instead) in DROPPED_FLAGS.items():
        if flag not in parser._option_string_actions:
            parser.add_argument(
                flag,
                action=_Ignored,
                nargs=None if takes_value else 0,
                default=argparse.SUPPRESS,
                dest=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                metavar=instead,
            )
