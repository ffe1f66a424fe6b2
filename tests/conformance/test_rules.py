"""Sampling and acceptance as the device runs them, beside the reference on the host."""

from collections.abc import Callable

import pytest
import torch

from tests.support.filter_cases import Filters, check_kept, make_rows, random_filters
from tests.support.verify_cases import counted, random_case
from vllm_gaudi_spec.devices.base import DeviceBackend
from vllm_gaudi_spec.methods import RULES
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.drafts import draft_greedy
from vllm_gaudi_spec.sampling.noise import Stream
from vllm_gaudi_spec.sampling.rules.registry import TORCH, Rules
from vllm_gaudi_spec.sampling.thinking import ThinkingMarkers, force_tokens

ROWS, POSITIONS = 400, 3
# Few tokens, of which drafts are often right; many, for what is sampled of them.
FEW_TOKENS, MANY_TOKENS = 6, 1000
SEVERAL_BLOCKS = 3000
"""Number of tokens, of which filters sort blocks."""
INPUTS = {
    "strict_greedy": ("logits_BQV", "drafts_BK", "num_drafts_B"),
    "strict_random": ("logits_BQV", "drafts_BK", "num_drafts_B", "temperature_B", "keys_B2", "positions_BQ"),
}
BY_PROBS = [name for name, rule in RULES.items() if rule.needs_probs]
PROBS_INPUTS = ("logits_BQV", "draft_probs_BKV", *INPUTS["strict_random"][1:])
# Of what is drawn, a score or a draw may lie within rounding of another.
MOST_DIFFERING = ROWS // 100


def case(vocab: int) -> dict[str, torch.Tensor]:
    made = random_case(ROWS, POSITIONS, vocab)
    made.temperature_B[::4] = 0
    return made.tensors()


every_rule = pytest.mark.parametrize("rule", ["strict_greedy", "strict_random", *BY_PROBS])


def verify(rules: Rules, rule: str) -> Callable[..., Verification]:
    return rules.verify[rule] if rule in BY_PROBS else getattr(rules, rule)


def verified(backend: DeviceBackend, rule: str, given: dict[str, torch.Tensor]) -> Verification:
    inputs = [backend.memory.upload(given[name].clone()) for name in INPUTS.get(rule, PROBS_INPUTS)]
    found = backend.graphs.graph(verify(backend.rules, rule))(*inputs)
    return Verification(
        backend.memory.download(found.tokens_BQ).clone(), backend.memory.download(found.num_sampled_B).clone()
    )


@every_rule
def test_verifications(backend: DeviceBackend, rule: str) -> None:
    given = case(FEW_TOKENS)
    expected = verify(TORCH, rule)(*(given[name].clone() for name in INPUTS.get(rule, PROBS_INPUTS)))
    found = verified(backend, rule, given)
    differing = [row for row in range(ROWS) if counted(found, row) != counted(expected, row)]
    assert len(differing) <= MOST_DIFFERING
    assert {len(counted(expected, row)) for row in range(ROWS)} >= set(range(1, POSITIONS + 1))


@every_rule
def test_rows_of_no_numbers(backend: DeviceBackend, rule: str) -> None:
    """They get tokens of the vocabulary, and their neighbors what they get without them."""
    given = case(FEW_TOKENS)
    expected, logits_BQV = verified(backend, rule, given), given["logits_BQV"]
    logits_BQV[1::5], logits_BQV[2::5, 1:], logits_BQV[3::5] = torch.nan, torch.nan, torch.inf
    found = verified(backend, rule, given)
    sound = torch.arange(ROWS) % 5 % 4 == 0
    assert torch.equal(found.tokens_BQ[sound], expected.tokens_BQ[sound])
    assert torch.equal(found.num_sampled_B[sound], expected.num_sampled_B[sound])
    assert ((found.tokens_BQ >= 0) & (found.tokens_BQ < FEW_TOKENS)).all()
    assert ((found.num_sampled_B >= 1) & (found.num_sampled_B <= POSITIONS + 1)).all()


@pytest.mark.parametrize("stream", [None, Stream.TARGET, Stream.DRAFT])
def test_samples(backend: DeviceBackend, stream: Stream | None) -> None:
    """Greedily the first of equal logits, with masked ones beside them; a Gaudi takes any."""
    given = case(MANY_TOKENS)
    if stream is None and not backend.traits.name.startswith("hpu"):
        given["logits_BQV"] = given["logits_BQV"].round()
        given["logits_BQV"][1], given["logits_BQV"][2, :, : MANY_TOKENS // 2] = -torch.inf, -torch.inf

    def sample(rules: Rules, logits: torch.Tensor, *noise: torch.Tensor) -> torch.Tensor:
        return rules.sample_greedy(logits) if stream is None else rules.sample_random(logits, *noise, stream)

    names = ("logits_BQV", "temperature_B", "keys_B2", "positions_BQ")
    expected = sample(TORCH, *(given[name].clone() for name in names))
    graph = backend.graphs.graph(lambda *inputs: sample(backend.rules, *inputs))
    found = backend.memory.download(graph(*(backend.memory.upload(given[name].clone()) for name in names)))
    assert int((found != expected).sum()) <= (0 if stream is None else MOST_DIFFERING)


def test_sound_logits(backend: DeviceBackend) -> None:
    logits = torch.randn(7, 5000)
    for row, (position, value) in enumerate([(0, torch.nan), (4999, torch.nan), (4096, torch.inf), (7, -torch.inf)]):
        logits[row, position] = value
    logits[4] = -torch.inf
    logits[5, :10], logits[5, 10:] = -torch.inf, torch.inf
    found = backend.graphs.graph(backend.rules.are_sound)(backend.memory.upload(logits))
    assert backend.memory.download(found).tolist() == [False, False, False, True, True, False, True]


def test_greedy_drafts(backend: DeviceBackend) -> None:
    """Of logits in the model's dtype, and whether those are numbers."""
    logits = torch.randn(6, 9001).bfloat16()
    logits[0, 9000], logits[1], logits[2, 8192], logits[5, 0] = 9.0, -torch.inf, 9.0, 9.0
    logits[3, 9000], logits[4, 7] = torch.nan, torch.inf

    def draft(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drafted = draft_greedy(backend.rules, logits_BV)
        assert drafted.sound_B is not None
        return drafted.tokens_B, drafted.sound_B

    tokens, is_sound = map(backend.memory.download, backend.graphs.graph(draft)(backend.memory.upload(logits)))
    assert is_sound.tolist() == [True, True, True, False, False, True]
    assert tokens[[0, 2, 5]].tolist() == [9000, 8192, 0]
    # Others have any token of the vocabulary.
    assert all(0 <= token < 9001 for token in tokens.tolist())


@pytest.mark.parametrize("names", [("top_p",), ("top_k",), ("min_p",), ("min_p", "top_k", "top_p")])
def test_filters(backend: DeviceBackend, names: tuple[str, ...]) -> None:
    """In one graph, for rows of every kind: what a sort keeps."""
    random = torch.Generator().manual_seed(0)
    logits = torch.cat([*make_rows(4, SEVERAL_BLOCKS, random)])
    rows = len(logits)
    off = Filters(
        torch.zeros(rows), torch.full((rows,), SEVERAL_BLOCKS, dtype=torch.int32), torch.full((rows,), torch.inf)
    )
    filters = off._replace(
        **{f"{name}_N": getattr(random_filters(rows, SEVERAL_BLOCKS, random), f"{name}_N") for name in names}
    )
    is_asked = [field.removesuffix("_N") in names for field in Filters._fields]

    def keep(logits: torch.Tensor, *asked: torch.Tensor) -> torch.Tensor:
        left = iter(asked)
        return backend.rules.filter_logits(logits, *(next(left) if is_one else None for is_one in is_asked))

    asked = [values for values, is_one in zip(filters, is_asked, strict=True) if is_one]
    uploaded = [backend.memory.upload(tensor.clone()) for tensor in (logits[:, None], *asked)]
    filtered = backend.memory.download(backend.graphs.graph(keep)(*uploaded))
    assert check_kept(logits, filters, filtered.squeeze(1)) < rows / 10


def test_thinking_budgets(backend: DeviceBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    markers = ThinkingMarkers(start=(1, 2), ends=((3,), (4, 0)), forced=(4, 0))
    history_BM = torch.randint(5, (ROWS, 40), generator=generator, dtype=torch.int32)
    positions_BQ = torch.randint(38, (ROWS, 1), generator=generator, dtype=torch.int32) + torch.arange(3).int()
    budget_B = torch.randint(-1, 4, (ROWS,), generator=generator, dtype=torch.int32)
    logits_BQV = torch.randn(ROWS, 3, FEW_TOKENS, generator=generator)

    def force(
        history_BM: torch.Tensor, positions_BQ: torch.Tensor, budget_B: torch.Tensor, logits_BQV: torch.Tensor
    ) -> torch.Tensor:
        return force_tokens(logits_BQV, markers.find_forced_tokens(history_BM, positions_BQ, budget_B))

    inputs = history_BM, positions_BQ, budget_B, logits_BQV
    expected = force(*inputs)
    assert 0 < (expected > 1e8).sum() < expected[..., 0].numel()
    found = backend.graphs.graph(force)(*(backend.memory.upload(tensor.clone()) for tensor in inputs))
    assert torch.equal(backend.memory.download(found), expected)
