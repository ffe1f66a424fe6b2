"""Drafting with a model whose next token depends on every token of the context and its position.

A slot, position or token that is off by one therefore changes the draft.
"""

import random
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import (
    CapturingBackend,
    HostBackend,
    batches_of,
    cached,
    make_requests,
    make_sampling,
    make_speculation,
    new_request,
    sampled,
    step,
)
from tests.support.warm_up import listed, run_jobs
from tests.unit.drafting.test_drafting import make_context
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.drafting.base import DeviceProposer
from vllm_gaudi_spec.drafting.draft_model import AutoregressiveProposer
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting, DeviceRowLimits
from vllm_gaudi_spec.drafting.vocabulary import SameVocabulary
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.records import Batch, Hidden, SampledRows
from vllm_gaudi_spec.runner.planning import locate

VOCAB, BLOCK, LONGEST = 97, 16, 96
MOST_BLOCKS = 64  # per row


def following(tokens: list[int], vocab: int = VOCAB) -> int:
    return sum((index + 1) * token for index, token in enumerate(tokens)) % vocab


class Remembers:
    """Stores (position + 1) * token in the KV slots and predicts the sum over the context."""

    def __init__(self, longest: int = LONGEST, vocab: int = VOCAB) -> None:
        self.kv = torch.zeros((1 + 3 * MOST_BLOCKS) * BLOCK, dtype=torch.long)
        self.longest, self.vocab = longest, vocab

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        assert int(inputs.positions_T.max()) < self.longest, "a position that the drafter does not have"
        self.kv[inputs.slots[0]] = self.keep(inputs, carried_TH)
        call, sums = inputs.calls[0], []
        assert int((inputs.slots[0] >= BLOCK).sum()) <= inputs.num_real_B.sum(), "what it reads is real"
        assert (call.starts_B + inputs.num_real_B <= self.longest).all()
        for row in range(call.num_rows):
            context = self.kv.view(-1, BLOCK)[call.block_table_BW[row].long()].flatten()
            sums += [context[: int(call.starts_B[row]) + query + 1].sum() for query in range(call.num_queries)]
        return Hidden((torch.stack(sums) % self.vocab)[:, None].float())

    def keep(self, inputs: Inputs, carried_TH: torch.Tensor | None) -> torch.Tensor:
        """Return the contents of the KV slots."""
        assert carried_TH is None, "only heads read more than tokens"
        return (inputs.positions_T + 1) * inputs.token_ids_T

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # Padding of the output matrix, whose ids must never be drafted.
        logits = torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB + 3).float()
        logits[:, VOCAB:] = 2.0
        return logits


class Rows:
    """Three requests with prompts of different lengths, one in two chunks, driven by a test."""

    hidden_states: Any = None

    def __init__(
        self,
        num_drafts: int,
        drafter_max_len: int = LONGEST,
        max_len: int = LONGEST,
        exact_context: bool = True,
        backend: HostBackend | None = None,
    ) -> None:
        self.max_len = max_len
        self.shapes = shapes(max_num_seqs=4, max_tokens=64, max_len=max_len, exact=exact_context, drafts=num_drafts)
        backend = backend or HostBackend()
        width = self.shapes.max_context + 1 + num_drafts
        sizes = dict(max_len=width, block_sizes=[BLOCK], max_context=self.shapes.max_context)
        self.requests = make_requests(backend, max_rows=4, **sizes)
        self.sampling = make_sampling(backend, vocab_size=VOCAB)
        self.recorder = StepRecorder()
        self.num_drafts = num_drafts
        self.drafting = self.build(drafter_max_len)
        self.recorder.expect(listed(self.drafting.jobs()))
        self.overlapping = True
        self.drafted: dict[str, int] = {}
        self.rejected: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}

    def build(self, drafter_max_len: int) -> DeviceDrafting:
        self.model = Remembers(drafter_max_len)
        proposer = AutoregressiveProposer(self.model, SameVocabulary(VOCAB, VOCAB + 3))
        return self.make_drafting("draft_model", proposer, drafter_max_len)

    def make_drafting(self, method: str, proposer: DeviceProposer, drafter_max_len: int) -> DeviceDrafting:
        speculation = make_speculation(self.num_drafts, drafter_max_len, method=method)
        context = make_context(
            speculation, self.requests, self.recorder, self.shapes, self.sampling, self.max_len, self.hidden_states
        )
        row_limits = DeviceRowLimits(self.requests.backend, 4, speculation, self.max_len)
        return DeviceDrafting(
            context,
            proposer=proposer,
            row_limits=row_limits,
            guard=Guard(independent=True),
            kv_sync=proposer.make_kv_sync(context, row_limits),
        )

    def start(
        self, prompts: dict[str, list[int]], chunk: int = 24, num_computed: int = 0, blocks: list[int] | None = None
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=500)
        computed, size = dict.fromkeys(prompts, num_computed), self.shapes.max_context // BLOCK
        new = [
            new_request(
                name,
                prompt,
                blocks or list(range(1 + size * i, 1 + size * (i + 1))),
                params=params,
                num_computed=num_computed,
            )
            for i, (name, prompt) in enumerate(prompts.items())
        ]
        while any(computed[name] < len(prompt) for name, prompt in prompts.items()):
            counts = {n: min(chunk, len(p) - computed[n]) for n, p in prompts.items() if computed[n] < len(p)}
            running = None if new else cached({name: computed[name] for name in counts})
            scheduled = step(counts, new=new, running=running)
            self.requests.apply(scheduled)
            for request in self.requests.admitted:
                self.sampling.admit(request)
            self.drafting.apply(self.requests)
            for batch in batches_of(scheduled, self.requests, self.shapes, {}):
                self.forward(batch)
            for name, count in counts.items():
                computed[name] += count
            new = []
        self.tokens |= {name: list(prompt) for name, prompt in prompts.items()}

    def forward(self, batch: Batch) -> None:
        """Emulate the computed count that the target's forward leaves."""
        rows = batch.inputs.split()
        located = locate(batch.shape.phase, rows, self.requests)
        self.requests.set_computed(rows.rows_B, located.starts_B + located.num_real_B)
        self.drafting.follow(batch)

    def sample(self, answers: dict[str, list[int]], max_drafts: int | None = None) -> dict[str, list[int]]:
        """Give each named row these tokens from the target, and return the drafts after them."""
        members = [self.requests.by_id[name] for name in answers]
        ends = [len(self.tokens[name]) + self.num_drafts for name in answers]  # as the scheduler counts
        queries = self.computed(list(answers))
        num_rows = self.shapes.fit_rows(len(members))
        rows_B = torch.from_numpy(self.requests.pad_rows(members, num_rows)).long()
        verification, last = sampled(list(answers.values()), num_rows), torch.zeros(num_rows).int()
        for index, (name, answer) in enumerate(answers.items()):
            last[index] = len(self.tokens[name]) - 1
            if name in self.rejected:  # otherwise its prompt ends here
                # With async scheduling the scheduler counted the drafts of the previous step as accepted.
                members[index].num_computed = int(last[index]) + self.overlapping * self.rejected[name]
            self.rejected[name] = self.drafted.get(name, 0) - (len(answer) - 1)
            self.tokens[name] += answer
        self.requests.advance(rows_B, last, verification)
        self.sampling.flush()
        self.drafting.on_verified(rows_B, last + 1 + verification.num_sampled_B)
        found: dict[str, list[int]] = {name: [] for name in answers}
        step_rows = SampledRows(requests=members, ends=ends, num_queries=queries, decode=None, rows_alone=None)
        branch, most = self.sampling.branch(members, {}), self.num_drafts if max_drafts is None else max_drafts
        if self.drafting.propose(step_rows, branch, most):
            drafts = self.requests.drafts(rows_B, self.num_drafts)
            rows = zip(answers, drafts.tokens_BK.tolist(), drafts.num_drafts_B.tolist(), strict=False)
            found = {name: row[:count] for name, row, count in rows}
        self.drafted |= {name: len(row) for name, row in found.items()}
        return found

    def computed(self, names: list[str]) -> int:
        """Emulate the target's forward for rows that sample, and return the number of positions of each."""
        return 1

    def expected(self, name: str) -> list[int]:
        tokens, room = list(self.tokens[name]), min(self.model.longest, self.max_len - 1) - len(self.tokens[name])
        drafts = []
        for _ in range(max(0, min(self.num_drafts, room))):
            drafts.append(following([*tokens, *drafts]))
        return drafts

    def check_steps(self, seed: int, share_off: float = 0.0) -> None:
        """Check random steps in which none, some or all drafts are accepted; in some no row may draft."""
        rng = random.Random(seed)
        drafts: dict[str, list[int]] = {name: [] for name in PROMPTS}
        for _ in range(14):
            scheduled = rng.sample(list(PROMPTS), rng.randint(1, 3))
            accepted = {name: drafts[name][: rng.randint(0, self.num_drafts)] for name in scheduled}
            off = rng.random() < share_off
            answers = {name: [*tokens, rng.randrange(VOCAB)] for name, tokens in accepted.items()}
            drafts |= self.sample(answers, max_drafts=0 if off else None)
            for name in scheduled:
                assert drafts[name] == ([] if off else self.expected(name)), name
        assert not self.recorder.unexpected

    def check_warm_up(self) -> None:
        run_jobs(self.drafting.jobs(), self.recorder)
        assert self.recorder._seen == self.recorder.manifest
        self.start(PROMPTS)
        assert self.sample({"a": [1], "b": [2]}) == {"a": self.expected("a"), "b": self.expected("b")}, (
            "nothing is left"
        )


PROMPTS = {"a": [5, 6, 7], "b": list(range(1, 42)), "c": [9] * 17}


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_drafts_follow_from_whole_context(num_drafts: int, seed: int, device: type[HostBackend]) -> None:
    rows = Rows(num_drafts, backend=device())
    rows.start(PROMPTS)
    rows.check_steps(seed)


@pytest.mark.parametrize("num_off", [1, 2, 4, 40])
def test_row_catches_up_after_steps_without_drafts(num_off: int) -> None:
    """The drafter has read nothing of the steps in which speculation was off."""
    rows = Rows(num_drafts=3)
    rows.start(PROMPTS)
    rows.sample({"a": [1], "b": [2]})
    for token in range(num_off):
        assert rows.sample({"a": [token]}, max_drafts=0)["a"] == []
    for _ in range(2):
        assert rows.sample({"a": [6], "b": [7]}) == {"a": rows.expected("a"), "b": rows.expected("b")}
    assert not rows.recorder.unexpected


def check_shared_blocks(rows: Rows, num_read: int, overlapping: bool) -> None:
    """Let a request find another's answer in the prefix cache, of which the drafter read `num_read` tokens."""
    rows.overlapping = overlapping
    rows.start({"a": [5, 6, 7]})
    for token in range(40):
        rows.sample({"a": [token]}, max_drafts=3 if token < num_read else 0)
    shared = [int(block) for block in rows.requests.tables_np[0][rows.requests.by_id["a"].row][:2]]
    prompt_ids = [*rows.tokens["a"][: 2 * BLOCK], *[9] * 20]
    rows.start({"b": prompt_ids}, num_computed=2 * BLOCK, blocks=[*shared, *range(100, 110)])
    assert rows.sample({"b": [8]}) == {"b": rows.expected("b")}


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("num_read", [0, 2, *range(10, 15)])
def test_shared_blocks_count_as_read_only_if_drafter_read_them(num_read: int, overlapping: bool) -> None:
    rows = Rows(num_drafts=3)
    check_shared_blocks(rows, num_read, overlapping)
    # Blocks of a request that always drafted need no reading.
    rows.start({"c": list(range(1, 40))}, blocks=list(range(120, 132)))
    rows.recorder._seen.clear()
    rows.start({"d": [*range(1, 33), 4]}, num_computed=2 * BLOCK, blocks=[120, 121, *range(140, 150)])
    chunks = len([signature for signature in rows.recorder._seen if "prefill" in signature])
    assert rows.sample({"d": [8]}) == {"d": rows.expected("d")}
    assert len([signature for signature in rows.recorder._seen if "prefill" in signature]) == chunks


def test_reused_block_is_unread_for_its_new_owner() -> None:
    rows = Rows(num_drafts=3)
    rows.start({"a": list(range(1, 40))}, blocks=[1, 2, 3, 4, 5])
    rows.sample({"a": [4]})
    rows.requests.apply(step({}, finished={"a"}))
    rows.start({"b": [7] * BLOCK}, blocks=[1, 2, 3, 4, 5])
    for token in range(40):
        rows.sample({"b": [token]}, max_drafts=0)
    prompt_ids = [*rows.tokens["b"][: 2 * BLOCK], 9]
    rows.start({"c": prompt_ids}, num_computed=2 * BLOCK, blocks=[1, 2, 30, 31, 32])
    assert rows.sample({"c": [8]}) == {"c": rows.expected("c")}
