"""vLLM's recurrent layers with our implementation of their recurrences. Importing this module registers the layers.

Parameters, weight loading, projections, and norms come from vLLM. `LayerState.follow` replaces the Triton, CUDA, or C++
kernels between the projections. Dimensions have the same letters as in `scans.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from vllm_gaudi_spec.attention.metadata import StateCall
from vllm_gaudi_spec.recurrent.scans import scan, scan_each
from vllm_gaudi_spec.recurrent.states import LayerShape, LayerState
from vllm_gaudi_spec.upstream.attention_backend import get_forward_context
from vllm_gaudi_spec.upstream.recurrent import (
    KimiGatedDeltaNetAttention,
    MambaMixer,
    MambaMixer2,
    OlmoHybridGatedDeltaNetAttention,
    QwenGatedDeltaNetAttention,
    ShortConv,
)


class RecurrentLayer:
    """Mixin for vLLM layers with a recurrent state."""

    prefix: str
    state: LayerState
    """The layer's states for all requests, which must be set before the first forward pass."""

    def layer_shape(self) -> LayerShape:
        raise NotImplementedError

    def recur(
        self, convolved_BQC: torch.Tensor, gates_BQG: torch.Tensor | None, is_real_BQ: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer's recurrence, as described at `Recurrence`. Layers without a state do not implement it."""
        raise NotImplementedError

    def follow(self, inputs_TC: torch.Tensor, gates_TG: torch.Tensor | None, conv: Any) -> torch.Tensor:
        """Apply the convolution and the recurrence to the tokens of a forward pass, and return the outputs [T, ...].

        Args:
            conv: The vLLM module that contains the weight and bias of the convolution.
        """
        call: StateCall = get_forward_context().attn_metadata[self.prefix]
        inputs_BQC = call.unflatten(inputs_TC)
        gates_BQG = None if gates_TG is None else call.unflatten(gates_TG)
        out_BQ = self.state.follow(call, inputs_BQC, gates_BQG, conv.weight.squeeze(1), conv.bias, self.recur)
        return call.flatten(out_BQ).to(inputs_TC.dtype)


def _zero_padding(tensor: torch.Tensor, is_real_BQ: torch.Tensor) -> torch.Tensor:
    return torch.where(is_real_BQ.view(*is_real_BQ.shape, *[1] * (tensor.dim() - 2)), tensor, 0.0)


def _split_heads(tensor: torch.Tensor, groups: int, num_heads: int) -> torch.Tensor:
    """Reshape [B, Q, groups * size] to [B, Q, H, size]. Each group is repeated for several heads."""
    tensor = tensor.unflatten(-1, (groups, 1, -1))
    return tensor.expand(*tensor.shape[:-2], num_heads // groups, -1).flatten(2, 3)


class DeltaNet(RecurrentLayer):
    """Mixin for gated delta nets with one decay per head."""

    conv_dim: int
    conv_kernel_size: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    tp_size: int
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    get_state_dtype: Callable[[], tuple[torch.dtype, ...]]
    allow_neg_eigval = False
    """Whether beta ranges up to 2 instead of 1, so that an update can change the sign of the value that a key reads."""

    def layer_shape(self) -> LayerShape:
        dtypes = self.get_state_dtype()
        num_heads = self.num_v_heads // self.tp_size
        return LayerShape(
            num_channels=self.conv_dim // self.tp_size,
            num_taps=self.conv_kernel_size,
            num_gates=2 * num_heads,
            state=(num_heads, self.head_k_dim, self.head_v_dim),
            dtype=dtypes[0],
            state_dtype=dtypes[1],
        )

    def recur(
        self, convolved_BQC: torch.Tensor, gates_BQG: torch.Tensor | None, is_real_BQ: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert gates_BQG is not None
        groups, num_heads = self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size
        key_size, value_size = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        query, key, value = _zero_padding(F.silu(convolved_BQC), is_real_BQ).split(
            [key_size, key_size, value_size], dim=-1
        )
        b_BQH, a_BQH = gates_BQG.float().chunk(2, dim=-1)
        decay_BQH = -self.A_log.float().exp() * F.softplus(a_BQH + self.dt_bias.float())
        beta_BQH = b_BQH.sigmoid() * 2 if self.allow_neg_eigval else b_BQH.sigmoid()
        return scan(
            _normalize(_split_heads(query, groups, num_heads)) * self.head_k_dim**-0.5,
            _normalize(_split_heads(key, groups, num_heads)),
            _split_heads(value, num_heads, num_heads),
            _zero_padding(decay_BQH, is_real_BQ).unsqueeze(-1),
            state,
            _zero_padding(beta_BQH, is_real_BQ),
        )


# Register the layer under the class that vLLM's models instantiate.
@QwenGatedDeltaNetAttention.register_oot
class GatedDeltaNet(DeltaNet, QwenGatedDeltaNetAttention):
    """The recurrent layer in Qwen3-Next and in the text model of Qwen3.5."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            query, key, value, gate, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            qkv = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
        else:
            qkv, gate = qkvz.split([self.conv_dim // self.tp_size, self.value_dim // self.tp_size], dim=-1)
            gate = gate.unflatten(-1, (-1, self.head_v_dim))
            b, a = self.split_ba(ba)
        return self._output_projection(self.follow(qkv, torch.cat((b, a), dim=-1), self.conv1d), gate)


@OlmoHybridGatedDeltaNetAttention.register_oot
class OlmoDeltaNet(DeltaNet, OlmoHybridGatedDeltaNetAttention):
    """The recurrent layer in OLMo Hybrid."""

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        sizes = [self.conv_dim // self.tp_size, self.value_dim // self.tp_size]
        qkv, gate = self.in_proj_qkvg(hidden_states)[0].split(sizes, dim=-1)
        gates = torch.cat((self.b_proj(hidden_states)[0], self.a_proj(hidden_states)[0]), dim=-1)
        read_THV = self.follow(qkv, gates, self.conv1d)
        normed_THV = self.o_norm(read_THV, gate.unflatten(-1, (-1, self.head_v_dim)))
        output.copy_(self.o_proj(normed_THV.flatten(1))[0])


@KimiGatedDeltaNetAttention.register_oot
class KimiDeltaAttention(RecurrentLayer, KimiGatedDeltaNetAttention):
    """The recurrent layer in Kimi Linear. Each component of a key has its own decay."""

    def layer_shape(self) -> LayerShape:
        dtypes = self.get_state_dtype()
        num_heads, size = self.local_num_heads, self.head_dim
        return LayerShape(
            num_channels=3 * self.local_projection_size,
            num_taps=self.conv_size,
            num_gates=num_heads * (1 + size),
            state=(num_heads, size, size),
            dtype=dtypes[0],
            state_dtype=dtypes[1],
        )

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the layer's output. `positions` is not used, because `RecurrentStates` tracks positions."""
        sizes = [3 * self.local_projection_size, self.local_num_heads, self.head_dim]
        qkv, beta, decay = self.in_proj_qkvgfab(hidden_states)[0].split(sizes, dim=-1)
        gates = torch.cat((beta, self.f_b_proj(decay)[0]), dim=-1)
        gate = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0]
        normed_THV = self.o_norm(self.follow(qkv, gates, self.conv1d), gate.unflatten(-1, (-1, self.head_dim)))
        output: torch.Tensor = self.o_proj(normed_THV.flatten(1))[0]
        return output

    def recur(
        self, convolved_BQC: torch.Tensor, gates_BQG: torch.Tensor | None, is_real_BQ: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert gates_BQG is not None
        num_heads = self.local_num_heads
        query, key, value = (
            part.unflatten(-1, (num_heads, -1))
            for part in _zero_padding(F.silu(convolved_BQC), is_real_BQ).chunk(3, dim=-1)
        )
        b_BQH, a_BQC = gates_BQG.float().split([num_heads, self.local_projection_size], dim=-1)
        steps_BQHK = F.softplus(a_BQC + self.dt_bias.float()).unflatten(-1, (num_heads, -1))
        return scan(
            _normalize(query) * self.head_dim**-0.5,
            _normalize(key),
            value,
            _zero_padding(-self.A_log.float().exp().unsqueeze(-1) * steps_BQHK, is_real_BQ),
            state,
            _zero_padding(b_BQH.sigmoid(), is_real_BQ),
        )


def _normalize(tensor: torch.Tensor) -> torch.Tensor:
    """Normalize vectors to unit length, with the same epsilon as the kernels with which the models were trained."""
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


@MambaMixer2.register_oot
class Mamba2(RecurrentLayer, MambaMixer2):
    """The recurrent layer in Granite 4, Nemotron-H, Falcon-H1, and other models that use Mamba 2."""

    def layer_shape(self) -> LayerShape:
        dtypes = self.get_state_dtype()
        return LayerShape(
            num_channels=self.tped_conv_size,
            num_taps=self.conv_kernel_size,
            num_gates=self.tped_dt_size,
            state=(self.tped_dt_size, self.ssm_state_size, self.head_dim),
            dtype=dtypes[0],
            state_dtype=dtypes[1],
        )

    def forward(self, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None) -> torch.Tensor:
        projected, _ = self.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        sizes = [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size]
        gate, inputs, dt = projected.split(sizes, dim=-1)
        output, _ = self.out_proj(self.norm(self.follow(inputs, dt, self.conv1d), gate))
        return output

    def recur(
        self, convolved_BQC: torch.Tensor, gates_BQG: torch.Tensor | None, is_real_BQ: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert gates_BQG is not None
        groups, num_heads = self.n_groups // self.tp_size, self.tped_dt_size
        value, key, query = self.split_hidden_states_B_C_fn(_zero_padding(F.silu(convolved_BQC), is_real_BQ))
        value_BQHV = _split_heads(value, num_heads, num_heads)
        step_BQH = _zero_padding(F.softplus(gates_BQG.float() + self.dt_bias.float()), is_real_BQ)
        out_BQHV, state = scan(
            _split_heads(query, groups, num_heads),
            _split_heads(key, groups, num_heads),
            value_BQHV * step_BQH.unsqueeze(-1),
            (step_BQH * self.A.float()).unsqueeze(-1),
            state,
        )
        return (out_BQHV + value_BQHV * self.D.float()[:, None]).flatten(2), state


@MambaMixer.register_oot
class Mamba1(RecurrentLayer, MambaMixer):
    """The recurrent layer in Jamba and other models that use Mamba 1. It computes gates from the convolved inputs."""

    def layer_shape(self) -> LayerShape:
        dtypes = self.get_state_dtype()
        return LayerShape(
            num_channels=self.A.shape[0],
            num_taps=self.conv_kernel_size,
            num_gates=0,
            state=tuple(self.A.shape),
            dtype=dtypes[0],
            state_dtype=dtypes[-1],
        )

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        inputs, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        output.copy_(self.out_proj(self.follow(inputs, None, self.conv1d) * F.silu(gate))[0])

    def recur(
        self, convolved_BQC: torch.Tensor, gates_BQG: torch.Tensor | None, is_real_BQ: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        value_BQC = _zero_padding(F.silu(convolved_BQC), is_real_BQ)
        step_CT, key_TK, query_TK = self._ssm_transform(value_BQC.flatten(0, 1).to(self.conv1d.weight.dtype))
        step_TC, key, query = step_CT.T.float() + self.dt_proj.bias.float(), key_TK.float(), query_TK.float()
        step, key, query = (tensor.unflatten(0, is_real_BQ.shape) for tensor in (F.softplus(step_TC), key, query))
        out_BQC, state = scan_each(query, key, value_BQC, _zero_padding(step, is_real_BQ), self.A, state)
        return out_BQC + value_BQC * self.D.float(), state


@ShortConv.register_oot
class ShortConvolution(RecurrentLayer, ShortConv):
    """The short convolution in LFM2, which has no recurrent state apart from its inputs."""

    def layer_shape(self) -> LayerShape:
        (dtype,) = self.get_state_dtype()
        channels = self.conv.weight.shape[0]
        return LayerShape(channels, self.L_cache, num_gates=0, state=(), dtype=dtype, state_dtype=dtype)

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        before, after, inputs = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        inputs = before * inputs
        output.copy_(self.out_proj(after * self.follow(inputs, None, self.conv))[0])
