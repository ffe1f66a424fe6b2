"""Building proposers: each method names its class in the table of methods."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from vllm_gaudi_spec.methods import METHODS

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.drafting.base import DeviceProposer, HostProposer, Model
    from vllm_gaudi_spec.drafting.universal.pairs import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerContext:
    """Parts that a proposer is built from."""

    speculation: Speculation
    vllm_config: VllmConfig
    device: torch.device
    model: Model | None
    """The drafter's model, for methods that have one."""
    pair: Pair | None
    """The two vocabularies, if the drafter has another one than the target."""

    @property
    def spec_config(self) -> SpeculativeConfig:
        assert self.vllm_config.speculative_config is not None
        return self.vllm_config.speculative_config

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        size: int = self.vllm_config.model_config.get_vocab_size()
        return size


def build_proposer(context: ProposerContext) -> HostProposer | DeviceProposer:
    module, name = METHODS[context.speculation.method].proposer.split(".")
    proposer = getattr(import_module(f"{__package__}.{module}"), name)
    built: HostProposer | DeviceProposer = proposer.build(context)
    return built
