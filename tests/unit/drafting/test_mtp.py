"""Chained MTP layers whose drafts depend on every token and state that each layer should have read.

A layer that reads a token, a state or a slot that is off by one, or a draft that was rejected, drafts something else.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from tests.support.fakes import CapturingBackend, HostBackend, step
from tests.unit.drafting.test_autoregressive import BLOCK, PROMPTS, VOCAB
from tests.unit.drafting.test_heads import HeadRows, ReadsStates, carry, state_after
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.drafting.mtp import AssistantProposer, ChainedProposer, _limit_layers
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting
from vllm_gaudi_spec.drafting.vocabulary import SameVocabulary
from vllm_gaudi_spec.records import Hidden


class Layer(ReadsStates):
    """One layer of a chain, with KV of its own. Its drafts are multiples of its state."""

    def __init__(self, longest: int, number: int) -> None:
        super().__init__(longest)
        self.number = number

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits((self.number + 2) * hidden % VOCAB)


class ChainedRows(HeadRows):
    num_layers = 3

    def build(self, drafter_max_len: int) -> DeviceDrafting:
        self.layers = [Layer(drafter_max_len, number) for number in range(self.num_layers)][: self.num_drafts]
        self.head = self.layers[0]
        return self.make_drafting("mtp", ChainedProposer(self.layers, SameVocabulary(VOCAB, VOCAB)), drafter_max_len)

    def expected(self, name: str) -> list[int]:
        """Return the drafts of layers that read each position once, when the token that they read there is known."""
        tokens = list(self.tokens[name])
        most = max(0, min(self.num_drafts, min(self.head.longest, self.max_len - 1) - len(tokens)))
        newest = len(tokens) - 2
        states = [state_after(tokens[: position + 1]) for position in range(newest + 1)]
        drafts: list[int] = []
        for number in range(min(most, len(self.layers), 1 + len(states))):
            kept = [(p + 1) * tokens[p + 1 + number] + 5 * state for p, state in enumerate(states)]
            sums = [sum(kept[: p + 1]) % VOCAB for p in range(len(kept))]
            drafts.append((number + 2) * sums[-1] % VOCAB)
            states = [(3 * total + 1) % VOCAB for total in sums]
            tokens.append(drafts[-1])
        for position in range(newest + 1, newest + 1 + most - len(drafts) if len(drafts) == len(self.layers) else 0):
            kept.append((position + 1) * drafts[-1] + 5 * states[-1])
            total = sum(kept) % VOCAB
            drafts.append((len(self.layers) + 1) * total % VOCAB)
            states.append((3 * total + 1) % VOCAB)
        return drafts


@pytest.mark.parametrize("num_drafts", [2, 3, 6])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk", [24, 5, 1])
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_each_draft_comes_from_its_layer(num_drafts: int, seed: int, chunk: int, device: type[HostBackend]) -> None:
    rows = ChainedRows(num_drafts, backend=device())
    rows.start(PROMPTS, chunk=chunk)
    rows.check_steps(seed, share_off=0.3)


def test_short_prompt_drafts_with_as_many_layers_as_it_has_states_for() -> None:
    rows = ChainedRows(num_drafts=3)
    rows.start({"a": [5], "b": [6, 7]})
    drafted = rows.sample({"a": [1], "b": [2]})
    assert drafted == {"a": rows.expected("a"), "b": rows.expected("b")}
    assert [len(drafts) for drafts in drafted.values()] == [2, 3]
    assert rows.sample({"a": [*drafted["a"], 3], "b": [2]}) == {"a": rows.expected("a"), "b": rows.expected("b")}


@pytest.mark.parametrize("apart", [1, 2, 3, 20])
def test_prefix_of_other_request_is_read_by_every_layer(apart: int) -> None:
    """vLLM drops the last block of a hit, so that the tokens which the later layers read are the same as well."""
    rows = ChainedRows(num_drafts=3)
    rows.start({"a": list(range(1, 60))}, chunk=64)
    rows.sample({"a": [9]})
    shared = [int(block) for block in rows.requests.tables_np[0][rows.requests.by_id["a"].row][:2]]
    kv = [layer.kv.view(-1, BLOCK)[shared].clone() for layer in rows.layers]
    prompt_ids = [*rows.tokens["a"][: 3 * BLOCK], *range(70, 70 + apart)]
    rows.start({"b": prompt_ids}, chunk=BLOCK, num_computed=2 * BLOCK, blocks=[*shared, *range(100, 110)])
    assert rows.sample({"b": [8]}) == {"b": rows.expected("b")}
    for layer, before in zip(rows.layers, kv, strict=True):
        assert torch.equal(layer.kv.view(-1, BLOCK)[shared], before)


def test_row_starts_anew_after_another_request() -> None:
    rows = ChainedRows(num_drafts=3)
    rows.start({"a": list(range(1, 60))}, chunk=24)
    rows.sample({"a": [9]})
    rows.requests.apply(step({}, finished={"a"}))
    rows.start({"b": [5, 6, 7]})
    assert rows.sample({"b": [8]}) == {"b": rows.expected("b")}


class Assistant:
    """Predicts a sum of its token, state and position. It has no KV to write."""

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        call = inputs.calls[0]
        assert torch.equal(call.starts_B, inputs.positions_T)
        assert (call.block_table_BW[inputs.num_real_B > 0, 0] > 0).all()
        sums_T = 11 * inputs.token_ids_T + 5 * carried_TH[:, 0] + 3 * inputs.positions_T
        last_TH = (sums_T % VOCAB)[:, None].float()
        return Hidden(last_TH, carry(last_TH))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()


class AssistantRows(HeadRows):
    def build(self, drafter_max_len: int) -> DeviceDrafting:
        proposer = AssistantProposer(Assistant(), SameVocabulary(VOCAB, VOCAB))
        return self.make_drafting("mtp", proposer, drafter_max_len)

    def expected(self, name: str) -> list[int]:
        tokens = self.tokens[name]
        token, state, drafts = tokens[-1], state_after(tokens[:-1]), []
        for _ in range(max(0, min(self.num_drafts, self.max_len - 1 - len(tokens)))):
            token = (11 * token + 5 * state + 3 * (len(tokens) - 2)) % VOCAB
            state = (3 * token + 1) % VOCAB
            drafts.append(token)
        return drafts


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_assistant_drafts_at_position_of_newest_state(num_drafts: int, device: type[HostBackend]) -> None:
    rows = AssistantRows(num_drafts, backend=device())
    rows.start(PROMPTS)
    rows.check_steps(seed=0, share_off=0.3)


def test_warm_up_covers_every_round_of_assistant() -> None:
    AssistantRows(num_drafts=3, drafter_max_len=600, max_len=600, exact_context=False).check_warm_up()


@pytest.mark.parametrize(("num_drafts", "num_built"), [(1, 1), (2, 2), (3, 3), (6, 3)])
@pytest.mark.parametrize("in_text_config", [False, True])
def test_no_more_layers_are_built_than_draft(in_text_config: bool, num_drafts: int, num_built: int) -> None:
    """vLLM's classes read the number in the target's configuration, some in the drafter's, and GLM-OCR's in the text
    configuration, with an `n_predict` of None."""
    configs: list[Any] = []
    for _ in range(2):
        numbers = PretrainedConfig(num_nextn_predict_layers=3, n_predict=None if in_text_config else 3)
        configs.append(PretrainedConfig(n_predict=None, text_config=numbers) if in_text_config else numbers)
    drafter, target = (SimpleNamespace(hf_config=config) for config in configs)
    speculative = SimpleNamespace(draft_model_config=drafter, num_speculative_tokens=num_drafts)
    vllm_config: Any = SimpleNamespace(speculative_config=speculative, model_config=target)
    assert _limit_layers(vllm_config) == num_built
    for config in configs:
        assert (config.text_config if in_text_config else config).num_nextn_predict_layers == num_built
