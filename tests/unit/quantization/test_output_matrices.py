"""Drafts from FP8 copies of output matrices, beside float64 computations of the numbers that the copies hold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from tests.support.distributions import request_keys
from vllm_gaudi_spec.config import E4M3_MAX, UnsupportedConfigError
from vllm_gaudi_spec.devices.cuda.fp8 import CudaArithmetic
from vllm_gaudi_spec.drafting.head import HeadProposer
from vllm_gaudi_spec.drafting.vocabulary import SameVocabulary
from vllm_gaudi_spec.quantization import native_linears
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic
from vllm_gaudi_spec.quantization.output_matrices import quantize_output_matrices
from vllm_gaudi_spec.records import Hidden
from vllm_gaudi_spec.runner.residence import Residence
from vllm_gaudi_spec.sampling.drafts import draft
from vllm_gaudi_spec.sampling.rules.registry import TORCH
from vllm_gaudi_spec.upstream import tensor_parallel_group
from vllm_gaudi_spec.upstream.patching import do_nothing

VOCAB, SIZE, ROWS = 100, 32, 6
GAUDIS = pytest.mark.parametrize("card", E4M3_MAX)
HIDDEN = 3 * torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0))


def make(kind: type[nn.Module], *sizes: int, rank: int = 0, world: int = 1) -> Any:
    group = SimpleNamespace(rank_in_group=rank, world_size=world)
    with set_current_vllm_config(VllmConfig()), tensor_parallel_group(group):
        made: Any = kind(*sizes)
    made.cpu_linear = nn.functional.linear  # what vLLM sets on a CPU when weights are loaded
    for seed, parameter in enumerate(made.parameters()):
        rows = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(1 + seed))
        rows *= torch.logspace(-3, 3, VOCAB)[:, None]  # so that one scale would not do
        parameter.data.zero_()[: VOCAB // world] = rows.chunk(world)[rank]
    return made


class Model(nn.Module):
    """The names and calls of vLLM's classes."""

    def __init__(self, matrix: Any, name: str = "lm_head") -> None:
        super().__init__()
        setattr(self, name, matrix)
        self._matrix = (matrix,)
        self.logits_processor = make(LogitsProcessor, VOCAB)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits_processor(self._matrix[0], hidden)
        return logits


def quantized(model: nn.Module, card: str = "gaudi2", arithmetic: Any = HostArithmetic) -> Any:
    weights = SimpleNamespace(fp8_logits=arithmetic, fp8_range=card)
    quantize_output_matrices(model, weights, "the drafter")
    return model


def rounded(rows: torch.Tensor, largest: float) -> torch.Tensor:
    """Return rows after they are rounded to e4m3 with a scale each, float64."""
    scale = rows.abs().amax(1, keepdim=True) / largest + 1e-8
    return (rows * (1 / scale)).clamp(-largest, largest).to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize("arithmetic", [HostArithmetic, CudaArithmetic])
@GAUDIS
def test_drafter_has_logits_of_rounded_numbers_and_target_those_of_its_own(card: str, arithmetic: Any) -> None:
    matrix = make(ParallelLMHead, VOCAB, SIZE)
    target, before = Model(matrix), matrix.weight.clone()
    exact = target.compute_logits(HIDDEN)
    found = quantized(Model(matrix), card, arithmetic).compute_logits(HIDDEN)
    expected = rounded(HIDDEN, E4M3_MAX[card]) @ rounded(before[:VOCAB], E4M3_MAX[card]).t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    difference = (found - exact).abs() / (HIDDEN.norm(dim=1, keepdim=True) * before[:VOCAB].norm(dim=1))
    assert 0.001 < float(difference.max()) < 0.05
    assert torch.equal(matrix.weight, before)
    assert torch.equal(target.compute_logits(HIDDEN), exact)


@pytest.mark.parametrize("path", ["lm_head", "shared_head.head", "language_model.lm_head"])
@pytest.mark.parametrize("kind", [ParallelLMHead, VocabParallelEmbedding], ids=["own", "embeddings"])
def test_matrices_are_found_by_the_names_of_vllms_classes(kind: type[nn.Module], path: str) -> None:
    matrix = make(kind, VOCAB, SIZE)
    *owners, name = path.split(".")
    model = Model(matrix, "embed_tokens")
    owner: nn.Module = model
    for part in owners:
        setattr(owner, part, nn.Module())
        owner = getattr(owner, part)
    setattr(owner, name, matrix)
    exact = model.compute_logits(HIDDEN)
    assert not torch.equal(quantized(model).compute_logits(HIDDEN), exact)
    assert sum(parameter.dtype == torch.float64 for parameter in model.parameters()) == 1


def test_other_matrices_of_a_drafter_stay() -> None:
    """DSpark's bias, for example."""
    model = Model(make(ParallelLMHead, VOCAB, SIZE))
    model.markov_w2 = make(ParallelLMHead, VOCAB, SIZE)
    before = model.logits_processor(model.markov_w2, HIDDEN)
    assert torch.equal(quantized(model).logits_processor(model.markov_w2, HIDDEN), before)


def test_quantized_or_unknown_matrices_are_refused() -> None:
    empty = make(ParallelLMHead, VOCAB, SIZE)
    empty.weight = nn.Parameter(torch.empty(0))
    eight_bits = make(ParallelLMHead, VOCAB, SIZE)
    eight_bits.weight = nn.Parameter(eight_bits.weight.to(torch.float8_e4m3fn), requires_grad=False)
    for model in (Model(empty), Model(eight_bits), Model(make(ParallelLMHead, VOCAB, SIZE), "embed_out")):
        with pytest.raises(UnsupportedConfigError, match=r"^the drafter has no unquantized output matrix"):
            quantized(model)


def test_gpu_refuses_sizes_that_its_kernel_does_not_take() -> None:
    with pytest.raises(UnsupportedConfigError, match=r"multiples of 16 .* has \(32, 40\)"):
        CudaArithmetic(448).keep(torch.zeros(32, 40, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_a_gpu_stay_in_float32(dtype: torch.dtype) -> None:
    one = torch.ones(16, 1)
    x = one.expand(16, 16).to(torch.float8_e4m3fn)
    assert CudaArithmetic(448).multiply(x, x.t(), one, one.t(), dtype).dtype is torch.float32


def test_slices_of_rows_give_the_same_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = make(ParallelLMHead, VOCAB, SIZE)
    whole, sliced = Model(matrix), Model(matrix)
    quantized(whole)
    monkeypatch.setattr(native_linears, "_ROWS_AT_ONCE", 7)
    quantized(sliced)
    for one, other in zip(whole.fp8_output_matrices.parameters(), sliced.fp8_output_matrices.parameters(), strict=True):
        assert torch.equal(one, other)


def test_ranks_quantize_their_own_rows() -> None:
    """A rank's scales are those of its rows, so nothing is exchanged but logits."""
    (whole,) = quantized(Model(make(ParallelLMHead, 128, SIZE))).fp8_output_matrices
    for rank in range(2):
        (part,) = quantized(Model(make(ParallelLMHead, 128, SIZE, rank=rank, world=2))).fp8_output_matrices
        assert part.tp_size == 2
        rows = slice(rank * VOCAB // 2, (rank + 1) * VOCAB // 2)
        assert torch.equal(part.weight[:, : VOCAB // 2], whole.weight[:, rows])
        assert torch.equal(part.weight_scale[: VOCAB // 2], whole.weight_scale[rows])


@pytest.mark.parametrize("is_draft", [False, True])
def test_new_weights_are_quantized_in_place(is_draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = make(ParallelLMHead, VOCAB, SIZE)
    model = quantized(Model(matrix))
    read = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]
    old = model.compute_logits(HIDDEN)

    def reload(*args: Any) -> None:
        matrix.weight.data.mul_(-2)

    monkeypatch.setattr("vllm_gaudi_spec.runner.residence.reload_weights", reload)
    monkeypatch.setattr("vllm_gaudi_spec.runner.residence.finalize_layerwise_reload", do_nothing)
    loaded: Any = SimpleNamespace(
        model=model,
        model_config=None,
        load_config=SimpleNamespace(device="cpu"),
        vllm_config=SimpleNamespace(),
        group=SimpleNamespace(rank_in_group=0, world_size=1),
    )
    backend: Any = SimpleNamespace(weights=SimpleNamespace(refresh=do_nothing))
    Residence(backend, loaded, loaded).reload(is_draft=is_draft)
    found = model.compute_logits(HIDDEN)
    assert not torch.allclose(found, old)
    assert torch.equal(found, quantized(Model(matrix)).compute_logits(HIDDEN))
    assert [(parameter, parameter.data_ptr()) for parameter in model.parameters()] == read


def test_probabilities_are_those_that_drafts_were_sampled_from() -> None:
    matrix = make(ParallelLMHead, VOCAB, SIZE)
    matrix.weight.data /= 3 * matrix.weight.data[:VOCAB].norm(dim=1).max() / SIZE
    exact = Model(matrix).compute_logits(HIDDEN).softmax(-1)
    model = quantized(Model(matrix))
    expected = (rounded(HIDDEN, 240.0) @ rounded(matrix.weight.data[:VOCAB], 240.0).t()).softmax(-1)
    head: Any = SimpleNamespace(logits=model.compute_logits)
    ends = torch.full((ROWS,), 5, dtype=torch.int32)

    def choose(logits_BV: torch.Tensor, before: int) -> Any:
        return draft(TORCH, logits_BV, "probabilistic", torch.ones(ROWS), request_keys(0, ROWS), ends + before, ends)

    request: Any = SimpleNamespace(
        hidden=Hidden(HIDDEN), num_drafts=1, lengths_B=ends, max_drafts_B=torch.ones_like(ends), choose=choose
    )
    drafts = HeadProposer(head, SameVocabulary(VOCAB, VOCAB)).propose(request)
    assert drafts.probs_BKV is not None
    torch.testing.assert_close(drafts.probs_BKV[:, 0], expected.float())
    assert float((drafts.probs_BKV[:, 0] - exact).abs().max()) > 1e-3
