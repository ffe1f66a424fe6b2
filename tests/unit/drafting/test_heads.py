"""Heads whose drafts depend on every token and hidden state at its position.

A slot, position, token or hidden state that is off by one therefore changes the draft.
"""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed import parallel_state

from tests.support.fakes import CapturingBackend, HostBackend, batches_of, cached, new_request, step
from tests.unit.drafting.test_autoregressive import BLOCK, PROMPTS, VOCAB, Remembers, Rows, following
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.base import DeviceProposer
from vllm_gaudi_spec.drafting.head import HeadProposer
from vllm_gaudi_spec.drafting.models import get_aux_layers, share_modules
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting
from vllm_gaudi_spec.drafting.vocabulary import ReducedVocabulary, SameVocabulary
from vllm_gaudi_spec.records import DECODE, Batch, Hidden
from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer, Located
from vllm_gaudi_spec.runner.planning import locate

NOBODYS = 89.0  # the state of padding and rejected tokens


def state_after(tokens: list[int]) -> int:
    return (11 * following(tokens) + 2) % VOCAB


def carry(states: torch.Tensor) -> torch.Tensor:
    return (3 * states + 1) % VOCAB


class ReadsStates(Remembers):
    """Stores 5 * state as well, and hands on a state of its own."""

    def keep(self, inputs: Inputs, carried_TH: torch.Tensor | None) -> torch.Tensor:
        return (inputs.positions_T + 1) * inputs.token_ids_T + 5 * carried_TH[:, 0].long()

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        last_TH = super().forward(inputs, carried_TH).last
        return Hidden(last_TH, carry(last_TH))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()


class HeadRows(Rows):
    def build(self, drafter_max_len: int) -> DeviceDrafting:
        self.head = ReadsStates(drafter_max_len)
        return self.make_drafting("eagle", HeadProposer(self.head, SameVocabulary(VOCAB, VOCAB)), drafter_max_len)

    def make_drafting(self, method: str, proposer: DeviceProposer, drafter_max_len: int) -> DeviceDrafting:
        self.fresh: set[str] = set()
        self.hidden_states = HiddenStateBuffer(
            num_rows=5,
            num_queries=1 + self.num_drafts,
            max_chunk_tokens=256,
            hidden_size=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        return super().make_drafting(method, proposer, drafter_max_len)

    def forward(self, batch: Batch) -> None:
        rows = batch.inputs.split()
        located = locate(batch.shape.phase, rows, self.requests)
        states = torch.full((batch.shape.rows, batch.shape.queries), NOBODYS)
        for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=True)):
            for query in range(count):
                states[row, query] = state_after(request.all_token_ids[: request.num_computed + query + 1])
        self.land(batch.shape.phase, rows.rows_B, located, states)
        self.fresh |= {request.req_id for request in batch.requests}
        super().forward(batch)

    def computed(self, names: list[str]) -> int:
        decodes = [name for name in names if name not in self.fresh]
        self.fresh -= set(names)
        queries = 1 + self.num_drafts if any(self.drafted.get(name) for name in decodes) else 1
        states = torch.full((len(decodes), queries), NOBODYS)
        starts = [len(self.tokens[name]) - 1 for name in decodes]
        counts = [1 + self.drafted.get(name, 0) for name in decodes]
        for row, (name, start, count) in enumerate(zip(decodes, starts, counts, strict=True)):
            request_row = self.requests.by_id[name].row
            history = self.requests.history_RM[request_row].tolist()
            for query in range(count):
                states[row, query] = state_after(history[: start + query + 1])
        if decodes:
            rows_B = torch.tensor([self.requests.by_id[name].row for name in decodes])
            self.land(DECODE, rows_B, Located(torch.tensor(starts).int(), torch.tensor(counts).int()), states)
        return queries

    def land(self, phase: str, rows_B: torch.Tensor, located: Located, states: torch.Tensor) -> None:
        states_TH = states.flatten()[:, None]
        self.hidden_states.put(phase, states.shape[1], rows_B, located, Hidden(states_TH, states_TH))

    def expected(self, name: str) -> list[int]:
        tokens = list(self.tokens[name])
        kept = [(index + 1) * token + 5 * state_after(tokens[: index + 1]) for index, token in enumerate(tokens[1:])]
        room = min(self.head.longest, self.max_len - 1) - len(tokens)
        drafts: list[int] = []
        for position in range(len(tokens) - 1, len(tokens) - 1 + max(0, min(self.num_drafts, room))):
            if drafts:
                kept.append(position * drafts[-1] + 5 * ((3 * drafts[-1] + 1) % VOCAB))
            drafts.append(sum(kept) % VOCAB)
        return drafts


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_drafts_follow_from_all_tokens_and_states(num_drafts: int, seed: int, device: type[HostBackend]) -> None:
    rows = HeadRows(num_drafts, backend=device())
    rows.start(PROMPTS)
    rows.check_steps(seed, share_off=0.3)


def test_head_reads_steps_without_drafts() -> None:
    """Another request takes over the blocks of one that wants no drafts."""
    rows = HeadRows(num_drafts=3)
    rows.start({"a": [5, 6, 7]})
    for token in range(40):
        rows.sample({"a": [token]}, max_drafts=0)
    shared = [int(block) for block in rows.requests.tables_np[0][rows.requests.by_id["a"].row][:2]]
    # The head's last slot of a shared prefix depends on the next token, so vLLM drops the last block.
    prompt_ids = [*rows.tokens["a"][: 2 * BLOCK], *rows.tokens["a"][2 * BLOCK : 2 * BLOCK + 1], 9, 9]
    rows.start({"b": prompt_ids}, num_computed=2 * BLOCK, blocks=[*shared, *range(100, 110)])
    assert rows.sample({"b": [8]}) == {"b": rows.expected("b")}


def test_row_is_read_although_host_counts_ahead() -> None:
    """Its last eight drafts were rejected, so the host's count, but not the row, exceeds the head's length."""
    rows = HeadRows(num_drafts=8, drafter_max_len=32)
    rows.start({"a": list(range(1, 26))})
    rows.sample({"a": [40]})
    rows.sample({"a": [50]}, max_drafts=0)  # all rejected
    rows.drafted["a"] = 0
    rows.rejected["a"] = 8
    rows.sample({"a": [51]}, max_drafts=0)
    assert rows.sample({"a": [52]})["a"] == rows.expected("a") != []


def test_only_rows_within_head_length_are_read() -> None:
    rows = HeadRows(num_drafts=2, drafter_max_len=24)
    rows.start({"a": [5, 6, 7], "b": list(range(1, 40))}, chunk=24)
    prompt_ids = {"c": list(range(3, 20)), "d": list(range(2, 42))}
    rows.start({"d": prompt_ids["d"]}, chunk=32, blocks=list(range(60, 70)))
    new = [new_request("c", prompt_ids["c"], list(range(80, 90)))]
    scheduled = step({"c": 17, "d": 8}, new=new, running=cached({"d": 32}))
    rows.requests.apply(scheduled)
    for request in rows.requests.admitted:
        rows.sampling.admit(request)
    rows.drafting.apply(rows.requests)
    batches = batches_of(scheduled, rows.requests, replace(rows.shapes, prefill_rows=(1, 2)), {})
    assert [len(batch.requests) for batch in batches] == [2]
    rows.forward(batches[0])
    rows.tokens |= {name: list(prompt) for name, prompt in prompt_ids.items()}
    assert rows.sample({"c": [1], "d": [2]}) == {"c": rows.expected("c"), "d": []}


def test_rejected_and_padded_positions_are_not_read() -> None:
    """After each step the slots up to the last position that was read are exact."""
    rng = random.Random(1)
    rows = HeadRows(num_drafts=4)
    rows.start(PROMPTS)
    drafts: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for _ in range(10):
        answers = {name: [*drafts[name][: rng.randint(0, 4)], rng.randrange(VOCAB)] for name in PROMPTS}
        drafts |= rows.sample(answers)
        for name in PROMPTS:
            tokens = rows.tokens[name]
            blocks = rows.requests.tables_np[0][rows.requests.by_id[name].row]
            own = rows.head.kv.view(-1, BLOCK)[torch.from_numpy(blocks).long()].flatten()[: len(tokens) - 1]
            kept = [(p + 1) * tokens[p + 1] + 5 * state_after(tokens[: p + 1]) for p in range(len(tokens) - 1)]
            assert own.tolist() == kept


def test_head_with_reduced_vocabulary_drafts_only_its_tokens() -> None:
    output_ids = torch.tensor([2, 5, 6])
    translation = ReducedVocabulary(output_ids, 8)
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.full((1, 8), -torch.inf)
    expected[0, output_ids] = logits[0]
    assert torch.equal(translation.to_target(logits), expected)
    assert torch.equal(translation.to_drafter(output_ids), output_ids)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_reduced_vocabulary_outside_of_the_target_is_refused(wrong: int) -> None:
    with pytest.raises(UnsupportedConfigError, match="outside of the target's vocabulary"):
        ReducedVocabulary(torch.tensor([2, wrong, 6]), 8)


# --- what is the target's ---


def linear(*size: int) -> nn.Linear:
    return nn.Linear(*(size or (3, 4)), bias=False)


def model_of(**parts: nn.Module) -> nn.Module:
    """Return a model in which `inner_x` becomes `model.x`."""
    made, made.model = nn.Module(), nn.Module()
    for name, part in parts.items():
        owner = made.model if name.startswith("inner_") else made
        setattr(owner, name.removeprefix("inner_"), part)
    return made


def test_head_without_matrices_shares_those_of_target() -> None:
    target = model_of(inner_embed_tokens=linear(), lm_head=linear())
    head = model_of(inner_embed_tokens=linear())
    head.has_own_embed_tokens = head.has_own_lm_head = False
    share_modules(target, head)
    assert head.model.embed_tokens is target.model.embed_tokens
    assert head.lm_head is target.lm_head


@pytest.mark.parametrize("equal", [False, True])
def test_own_matrices_are_kept_unless_equal(equal: bool) -> None:
    target = model_of(inner_embed_tokens=linear(), lm_head=linear())
    head = model_of(inner_embed_tokens=linear(), lm_head=linear())
    head.has_own_embed_tokens = head.has_own_lm_head = True
    if equal:
        head.lm_head.weight = nn.Parameter(target.lm_head.weight.clone())
    share_modules(target, head)
    assert head.model.embed_tokens is not target.model.embed_tokens
    assert (head.lm_head is target.lm_head) == equal


@pytest.mark.parametrize(
    ("container", "has_own"),
    [(nn.ModuleList, False), (lambda layers: nn.ModuleDict({"9": layers[0]}), False), (nn.ModuleList, True)],
    ids=["list", "by number", "own"],
)
def test_mtp_layers_use_output_matrix_of_target_unless_they_have_one(container: Any, has_own: bool) -> None:
    """Step 3.5's layers have output matrices, and nothing else of the checkpoint does."""
    layer = nn.Module()
    layer.shared_head = model_of(head=linear())
    own, target = layer.shared_head.head, model_of(inner_embed_tokens=linear(), lm_head=linear())
    head = model_of(inner_layers=container([layer]), inner_embed_tokens=linear())
    if has_own:
        head.has_own_lm_head = True
    share_modules(target, head)
    assert layer.shared_head.head is (own if has_own else target.lm_head)


def test_embeddings_of_target_may_be_its_output_matrix() -> None:
    target, head = model_of(inner_embed_tokens=linear()), model_of(inner_embed_tokens=linear())
    share_modules(target, head)
    assert head.lm_head is target.model.embed_tokens
    with pytest.raises(UnsupportedConfigError, match="has no embeddings under a name that heads know"):
        share_modules(model_of(lm_head=linear()), head)


def test_whole_head_shares_modules_of_split_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared modules run in the target's group, within a head of one rank."""
    target_group, alone = SimpleNamespace(world_size=2), SimpleNamespace(world_size=1)
    asked: list[Any] = []

    class Embeddings(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            asked.append(parallel_state.get_tp_group())
            return tokens + 1

    target = model_of(inner_embed_tokens=Embeddings(), lm_head=linear())
    head = model_of(inner_embed_tokens=linear())
    monkeypatch.setattr(parallel_state, "_TP", alone)
    share_modules(target, head, target_group)
    assert head.model.embed_tokens(torch.tensor(3)) == 4
    assert asked == [target_group]
    assert parallel_state.get_tp_group() is alone
    assert head.lm_head is target.lm_head


def test_aux_layers_are_read_from_config() -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 5]}

    def read(**fields: Any) -> list[int] | None:
        described = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**fields)))
        layers = get_aux_layers(described)
        return None if layers is None else list(layers)

    assert read(eagle_aux_hidden_state_layer_ids=[2, 3], eagle_config=nested) == [2, 3]
    assert read(eagle_config=nested) == [1, 5]
    assert read(eagle_config=None) is None
    # The outputs of these layers, which the layers after them read.
    assert read(dflash_config=dict(target_layer_ids=[1, 5])) == [2, 6]
