"""A drafter of vllm-ascend as its runner makes and calls it.

Configuration, proposer, drafter model and attention backend are real; only the runner around them is a stand-in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import BatchDescriptor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm_ascend.ascend_config import clear_ascend_config, init_ascend_config
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

K = 4
BLOCK = 128
BLOCKS_PER_ROW = 2
MAX_ROWS = 4
FALSE = 77  # what is sampled for a row of which more is to be read first
NPU = torch.device("npu")
LIMITS: dict[str, Any] = {"max_model_len": BLOCK * BLOCKS_PER_ROW, "max_num_seqs": MAX_ROWS, "dtype": "float32"}


def configuration(target: str, drafter: str, method: str = "universal_draft", **more: Any) -> VllmConfig:
    speculative = {"method": method, "model": drafter, "num_speculative_tokens": K, **more.pop("speculative", {})}
    arguments = EngineArgs(model=target, speculative_config=speculative, **{"enforce_eager": True, **more}, **LIMITS)
    return made(arguments)


def made(arguments: EngineArgs) -> VllmConfig:
    config = arguments.create_engine_config()
    config.device_config.device = NPU
    return config


def start(config: VllmConfig) -> None:
    """What a worker does before it makes its runner. Once for each process, but for the configuration."""
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
            initialize_model_parallel()
        clear_ascend_config()
        init_ascend_config(config)


def runner(config: VllmConfig) -> Any:
    """As much of vllm-ascend's runner as its proposers look at."""
    decides = SimpleNamespace(compilation_config=config.compilation_config, model_config=config.model_config)

    def make_buffer(*size: int, dtype: torch.dtype, numpy: bool = True) -> CpuGpuBuffer:
        return CpuGpuBuffer(*size, dtype=dtype, device=NPU, pin_memory=False, with_numpy=numpy)

    return SimpleNamespace(
        max_num_reqs=MAX_ROWS,
        max_num_tokens=1024,
        pcp_size=1,
        dcp_size=1,
        pin_memory=False,
        enable_enpu=False,
        use_eagle=False,
        dynamic_eplb=False,
        attn_state=AscendAttentionState.ChunkedPrefill,
        actual_seq_lengths_q=[],
        decode_token_per_req=1 + K,
        input_batch=SimpleNamespace(lora_id_to_lora_request={}),
        get_model=lambda: None,
        _use_aclgraph=lambda: NPUModelRunner._use_aclgraph(decides),
        _make_buffer=make_buffer,
        _sync_metadata_across_dp=lambda num_tokens, is_draft_model=False: (num_tokens, None, None),
    )


@dataclass
class Scene:
    config: VllmConfig
    proposer: Any

    @classmethod
    def load(cls, config: VllmConfig) -> Scene:
        """Make the proposer by the name of its method, load its model and give it KV."""
        from vllm_ascend.spec_decode import get_spec_decode_method

        start(config)
        with set_current_vllm_config(config):
            proposer = get_spec_decode_method(config.speculative_config.method, config, NPU, runner(config))
            proposer.load_model(torch.nn.ModuleDict({"model": torch.nn.Module()}))  # in the target's place
            layers = {
                name: config.compilation_config.static_forward_context[name] for name in proposer.attn_layer_names
            }
            spec = next(iter(layers.values())).get_kv_cache_spec(config)
            assert isinstance(spec, FullAttentionSpec)
            shape = (2, MAX_ROWS * BLOCKS_PER_ROW, BLOCK, spec.num_kv_heads, spec.head_size)
            for layer in layers.values():
                layer.kv_cache = tuple(torch.empty(shape, device=NPU))
            group = KVCacheGroupSpec(list(layers), spec)
            proposer.initialize_attn_backend(KVCacheConfig(shape[1], [], [group]), [BLOCK])
        scene = cls(config, proposer)
        scene.forget()
        return scene

    def forget(self, written: float = 1e30) -> None:
        """Start anew: what no row has written since shows where it is read, and not where a mask hides it."""
        for name in self.proposer.attn_layer_names:
            keys, values = self.config.compilation_config.static_forward_context[name].kv_cache
            keys.zero_()
            values.fill_(written)

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        following: Sequence[int],
        accepted: Sequence[int] | None = None,
        discarded: Sequence[int] = (),
    ) -> list[list[int]]:
        """One call as the runner makes it: each row has read these tokens of the target's from its start on, and
        `following` was sampled. With `accepted` its tokens are a sampled one and K drafts, so many of which count.
        What was sampled for discarded rows is nothing; there `following` is the last token that the host knows, if any.
        """
        lengths = [len(row) for row in tokens]
        locations = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        ends = torch.tensor([start + length for start, length in zip(starts, lengths, strict=True)], dtype=torch.int32)
        places = [(row, start + i) for row, start in enumerate(starts) for i in range(lengths[row])]
        table = torch.arange(len(tokens) * BLOCKS_PER_ROW, dtype=torch.int32).view(-1, BLOCKS_PER_ROW)
        slots = [int(table[row, at // BLOCK]) * BLOCK + at % BLOCK for row, at in places]
        metadata = AscendCommonAttentionMetadata(
            query_start_loc=locations.to(NPU),
            query_start_loc_cpu=locations,
            seq_lens=ends.to(NPU),
            seq_lens_cpu=ends,
            _seq_lens_cpu=ends,
            num_computed_tokens_cpu=torch.tensor(starts, dtype=torch.int32),
            num_reqs=len(tokens),
            num_actual_tokens=len(places),
            num_input_tokens=len(places),
            max_query_len=max(lengths),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.to(NPU),
            slot_mapping=torch.tensor(slots, dtype=torch.int32, device=NPU),
            positions=torch.zeros(1024, dtype=torch.int64, device=NPU),
            attn_state=AscendAttentionState.ChunkedPrefill,
        )
        if accepted is None:
            sampled = [[FALSE if row in discarded else token] for row, token in enumerate(following)]
        else:
            said = [[*row[1 : 1 + n], token] for row, n, token in zip(tokens, accepted, following, strict=True)]
            sampled = [[*row, *[-1] * (1 + K - len(row))] for row in said]
        following_B, counts_B = self.following(sampled, following, discarded)
        to_sample = refused = None
        if accepted is not None:
            drafts = SimpleNamespace(
                cu_num_draft_tokens=torch.arange(K, K * len(tokens) + 1, K, dtype=torch.int32, device=NPU)
            )
            metadata, _, to_sample, refused = self.proposer.prepare_inputs_padded(metadata, drafts, counts_B)
        with torch.inference_mode(), set_current_vllm_config(self.config):
            made = self.proposer._propose(
                target_token_ids=torch.tensor(
                    [token for row in tokens for token in row], dtype=torch.int32, device=NPU
                ),
                target_positions=torch.tensor([at for _, at in places], dtype=torch.int64, device=NPU),
                target_hidden_states=torch.zeros(len(places), 1, device=NPU),
                next_token_ids=following_B,
                token_indices_to_sample=to_sample,
                common_attn_metadata=metadata,
                target_model_batch_desc=BatchDescriptor(num_tokens=len(places)),
                sampling_metadata=None,
                num_rejected_tokens_gpu=refused,
            )
        assert made.shape == (len(tokens), K)
        return made.tolist()

    def following(
        self, sampled: list[list[int]], known: Sequence[int], discarded: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token of each row that the drafter goes on from, and how many were sampled. A row that has no sampled one
        goes on from what the host knows; -1: its last token is still on the device."""
        requests = {
            str(row): SimpleNamespace(get_token_id=lambda place, token=token: token) for row, token in enumerate(known)
        }
        batch = SimpleNamespace(
            num_reqs=len(known),
            num_tokens_no_spec=np.ones(len(known), dtype=np.int32),
            req_ids=list(requests),
            vocab_size=self.config.model_config.get_vocab_size(),
        )
        return self.proposer.prepare_next_token_ids_padded(
            torch.tensor(sampled, dtype=torch.int32, device=NPU),
            requests,
            batch,
            torch.tensor(discarded, dtype=torch.int64, device=NPU),
            len(discarded),
        )
