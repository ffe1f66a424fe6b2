"""In the place of what vllm-ascend has compiled, and of a Triton kernel of vLLM's that it calls even without Triton."""

from typing import Any

import torch

_ascend = torch.library.Library("_C_ascend", "FRAGMENT")
_ascend.define(
    "npu_copy_and_expand_eagle_inputs(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids, "
    "Tensor query_start_loc, Tensor query_end_loc, int padding_token_id, int parallel_drafting_token_id, "
    "int num_padding_slots_per_request, bool shift_input_ids, int total_draft_tokens) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_ascend, "npu_copy_and_expand_eagle_inputs", "PrivateUse1")
def copy_and_expand(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    following: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    padding: int,
    parallel_token: int,
    num_slots: int,
    shifted: bool,
    size: int,
) -> tuple[torch.Tensor, ...]:
    """What a draft model reads: each row's tokens up to its last accepted one, the token that follows, then padding."""
    assert tokens.dtype == positions.dtype == following.dtype == torch.int32
    assert num_slots == 1
    assert not shifted
    ids, places, rejected, last = [], [], [], []
    for row, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        read = tokens[start : ends[row] + 1].tolist()
        refused = end - start - len(read)
        ids += [*read, int(following[row]), *[padding] * refused]
        last.append(len(places) + len(read))
        places += [*range(int(positions[start]), int(positions[start]) + len(read) + 1), *[0] * refused]
        rejected += [0] * (len(read) + 1) + [1] * refused
    assert len(ids) == size
    read_and_places = torch.tensor([ids, places], dtype=torch.int32)
    flags = torch.tensor(rejected, dtype=torch.int8)
    unused = torch.zeros(len(tokens), dtype=torch.int32)
    made = (*read_and_places, flags, torch.zeros_like(flags), torch.tensor(last, dtype=torch.int32), unused)
    return tuple(it.to(tokens.device) for it in made)


class SlotMapping:
    """vLLM's `_compute_slot_mapping_kernel`: the slot of each token, and after them the number for none."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self._run

    @staticmethod
    def _run(
        count: int,
        size: int,
        starts: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        width: int,
        block_size: int,
        slots: torch.Tensor,
        *,
        TOTAL_CP_WORLD_SIZE: int,
        PAD_ID: int,
        **unused: int,
    ) -> None:
        assert TOTAL_CP_WORLD_SIZE == 1
        tokens = torch.arange(count, device=positions.device)
        rows = (tokens[:, None] >= starts[None, 1:]).sum(1).clamp(max=len(table) - 1)
        blocks = table.flatten().index_select(0, rows * width + positions // block_size)
        slots[:count] = (blocks.to(torch.int64) * block_size + positions % block_size).to(slots.dtype)
        slots[count:size] = PAD_ID
