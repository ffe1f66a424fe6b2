"""The GPU's sampling and acceptance against the reference, and that nothing is left over between calls.

Run on a GPU, or without one with TRITON_INTERPRET=1.
"""

import importlib
from typing import Any

import pytest
import torch

from tests.support.verify_cases import random_case
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.rules.registry import TORCH, Rules

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def cuda() -> Rules:
    return importlib.import_module("vllm_gaudi_spec.devices.cuda.rules").RULES


def case_on_gpu(rows: int, positions: int, vocab: int, seed: int = 0, masked: float = 0.2) -> dict[str, torch.Tensor]:
    case = random_case(rows, positions, vocab, seed, masked)
    case.temperature_B[::4] = 0
    return {name: value.to(DEVICE) for name, value in case.tensors().items()}


def verify(rules: Rules, rule: str, given: dict[str, torch.Tensor]) -> Verification:
    drafts = given["drafts_BK"], given["num_drafts_B"]
    noise = given["temperature_B"], given["keys_B2"], given["positions_BQ"]
    if rule == "strict_greedy":
        return rules.strict_greedy(given["logits_BQV"], *drafts)
    if rule == "strict_random":
        return rules.strict_random(given["logits_BQV"], *drafts, *noise)
    return rules.verify[rule](given["logits_BQV"], given["draft_probs_BKV"], *drafts, *noise)


def counted(verification: Verification) -> list[list[int]]:
    rows = zip(verification.tokens_BQ.tolist(), verification.num_sampled_B.tolist(), strict=True)
    return [row[:number] for row, number in rows]


# One chunk and many, a partial last chunk, unaligned rows, chunks of either size.
SHAPES = [(200, 3, 6), (50, 1, 1025), (9, 4, 5000), (200, 2, 32_000), (17, 16, 16_001)]
if DEVICE.type == "cpu":  # in the interpreter an instance takes milliseconds
    SHAPES = [(60, 3, 6), (4, 1, 1025), (2, 4, 2500)]


@pytest.mark.parametrize(("rows", "positions", "vocab"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_argmax(
    cuda: Rules, rows: int, positions: int, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":  # several chunks in the interpreter as well
        monkeypatch.setattr("vllm_gaudi_spec.devices.cuda.rules._SOUND_CHUNK", 1024)
    logits = case_on_gpu(rows, positions, vocab)["logits_BQV"].flatten(0, 1).to(dtype)
    # In the first and last chunk, and beside minus infinity.
    for row, (position, value) in enumerate([(0, torch.nan), (vocab - 1, torch.nan), (vocab // 2, torch.inf)]):
        logits[row, position] = value
    logits[3, vocab // 2 :] = 99.0  # equal best logits in several chunks: the first wins
    for _ in range(2):  # the first call must reset the counters
        tokens, is_sound = cuda.sound_argmax(logits)
        assert is_sound.tolist() == [row > 2 for row in range(len(logits))] == TORCH.are_sound(logits).tolist()
        assert torch.equal(tokens[3:], TORCH.sample_greedy(logits[:, None])[3:, 0])
        assert (tokens[:3] < vocab).all()
        assert (tokens[:3] >= 0).all()
    tokens, is_sound = cuda.sound_argmax(torch.full_like(logits[:2], -torch.inf))
    assert is_sound.all()
    assert not tokens.any()


@pytest.mark.parametrize(("rows", "positions", "vocab"), SHAPES)
@pytest.mark.parametrize("rule", ["strict_greedy", "strict_random", "standard", "block"])
def test_verifications(cuda: Rules, rule: str, rows: int, positions: int, vocab: int) -> None:
    given = case_on_gpu(rows, positions, vocab, seed=1)
    found, expected = counted(verify(cuda, rule, given)), counted(verify(TORCH, rule, given))
    # A draw may be within rounding of a probability, and a score of another score.
    differing = sum(own != other for own, other in zip(found, expected, strict=True))
    assert differing <= rows // 100
    assert counted(verify(cuda, rule, given)) == found


@pytest.mark.parametrize("rule", ["strict_random", "standard", "block"])
def test_rows_with_views_for_inputs(cuda: Rules, rule: str) -> None:
    """Keys are columns of a wider tensor, and all rows' positions may be the same memory, as in the runner."""
    given = case_on_gpu(8, 3, 2000)
    given["keys_B2"] = torch.cat((given["keys_B2"], given["keys_B2"]), 1)[:, 2:]
    given["positions_BQ"] = torch.arange(5, 9, dtype=torch.int32, device=DEVICE).expand(8, -1)
    assert counted(verify(cuda, rule, given)) == counted(verify(TORCH, rule, given))


@pytest.fixture(params=[None, (512, 8, 48, True), (1024, 8, 64, True)], ids=["one wave", "waves", "many waves"])
def work(cuda: Rules, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for kernel instances that run one after the other, and check whether they are needed."""
    from vllm_gaudi_spec.devices.cuda import rules as cuda_rules

    if request.param:
        monkeypatch.setattr(cuda_rules._Work, "choose", lambda rows, vocab: cuda_rules._Work(*request.param))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter takes minutes")
@pytest.mark.parametrize("rule", ["strict_greedy", "strict_random"])
def test_results_do_not_depend_on_the_order_of_instances(cuda: Rules, work: None, rule: str) -> None:
    test_verifications(cuda, rule, 280, 4, 32_000)


@pytest.mark.parametrize("rule", ["strict_greedy", "strict_random"])
def test_positions_after_the_end_of_a_request_have_no_effect(cuda: Rules, work: None, rule: str) -> None:
    """The end is at every position: without drafts, after a wrong one, after correct ones.

    Later positions may be skipped.
    """
    rows, positions, vocab = 12, 4, 3000
    given = case_on_gpu(rows, positions - 1, vocab, seed=4)
    right = verify(TORCH, rule, given).tokens_BQ[:, : positions - 1]
    given["drafts_BK"].copy_(right)
    given["num_drafts_B"].fill_(positions - 1)
    for row in range(rows):
        if row % positions < positions - 1:
            given["drafts_BK"][row, row % positions] += 1
    given["num_drafts_B"][:2] = 0
    for _ in range(3):
        found = verify(cuda, rule, given)
        assert counted(found) == counted(verify(TORCH, rule, given))
        assert [len(row) for row in counted(found)] == [1, 1, *(row % positions + 1 for row in range(2, rows))]
        assert int(found.tokens_BQ.min()) >= 0
        assert int(found.tokens_BQ.max()) < vocab


def test_more_rows_than_can_be_counted(cuda: Rules) -> None:
    with pytest.raises(ValueError, match="at most 65535 rows"):
        cuda.sample_greedy(torch.zeros(1, device=DEVICE).expand(40_000, 2, 1))


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_empty_residual_samples_from_the_target(cuda: Rules, rule: str) -> None:
    """Drafts outside of the vocabulary are rejected; the drafter's distribution is the target's, so the residual is
    empty."""
    given = case_on_gpu(8, 2, 3000)
    given["draft_probs_BKV"] = given["logits_BQV"][:, :2].softmax(-1) + 1e-6
    given["drafts_BK"].fill_(-1)
    given["num_drafts_B"].fill_(2)
    assert counted(verify(cuda, rule, given)) == counted(verify(TORCH, rule, given))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no graphs")
@pytest.mark.parametrize("rule", ["strict_greedy", "strict_random", "standard", "block"])
def test_captured(cuda: Rules, rule: str) -> None:
    given = case_on_gpu(30, 4, 32_000, seed=2)
    other = case_on_gpu(30, 4, 32_000, seed=3)
    expected = [counted(verify(cuda, rule, inputs)) for inputs in (given, other)]
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verification = verify(cuda, rule, given)
    graph.replay()
    assert counted(verification) == expected[0]
    for name, value in other.items():
        given[name].copy_(value)
    graph.replay()
    assert counted(verification) == expected[1]


def test_filters_skip_positions_that_are_not_sampled(cuda: Rules) -> None:
    logits = torch.randn(3, 4, 300).to(DEVICE)
    top_p = torch.tensor([0.5, 0.9, torch.inf], device=DEVICE)
    num_sampling = torch.tensor([2, 1, 4], dtype=torch.int32, device=DEVICE)
    filtered = cuda.filter_logits(logits, None, None, top_p, num_sampling_B=num_sampling)
    expected = cuda.filter_logits(logits, None, None, top_p)
    for row, number in enumerate(num_sampling.tolist()):
        assert torch.equal(filtered[row, :number], expected[row, :number])
