"""Drafting in the drafter's own tokens, with a model whose next token depends on everything that it has read."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import (
    CapturingBackend,
    HostBackend,
    make_requests,
    make_sampling,
    make_speculation,
    new_request,
    sampled,
    step,
)
from tests.support.warm_up import listed, run_jobs
from tests.unit.drafting.test_drafting import make_context
from tests.unit.drafting.test_retokenizing import Languages
from tests.unit.drafting.test_token_bytes import random_texts
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.drafting.universal.text_drafting import RetokenizedProposer, TextDrafting
from vllm_gaudi_spec.drafting.universal.timeline import Timeline
from vllm_gaudi_spec.drafting.vocabulary import DrafterVocabulary, MappedVocabulary, Translation
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.records import Hidden, StepResult
from vllm_gaudi_spec.step_inputs import HostBlocks

NUM_ROWS, MAX_LEN, BLOCK = 4, 256, 16


def following(tokens: list[int], vocab: int) -> int:
    return sum((index + 1) * token for index, token in enumerate(tokens)) % vocab


class ClosestToken:
    """Predicts the sum of (position + 1) * token over the context, and chooses the draftable token that is closest."""

    def __init__(self, longest: int, vocab: int) -> None:
        self.kv = torch.zeros(200 * BLOCK, dtype=torch.long)
        self.longest, self.vocab = longest, vocab

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        assert int(inputs.positions_T.max()) < self.longest, "a position that the drafter does not have"
        self.kv[inputs.slots[0]] = (inputs.positions_T + 1) * inputs.token_ids_T
        call, sums = inputs.calls[0], []
        for row in range(call.num_rows):
            context = self.kv.view(-1, BLOCK)[call.block_table_BW[row].long()].flatten()
            sums += [context[: int(call.starts_B[row]) + query + 1].sum() for query in range(call.num_queries)]
        return Hidden((torch.stack(sums) % self.vocab)[:, None].float())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -(torch.arange(self.vocab) - hidden).abs().float()


class FixedRegion:
    """Model memory for three rows, in an order that no other table has."""

    def __init__(self, length: int) -> None:
        self.length = length
        width = -(-length // BLOCK)
        self.table = np.zeros((NUM_ROWS + 1, 64), dtype=np.int32)
        self.table[:NUM_ROWS, :width] = 1 + np.arange(NUM_ROWS * width).reshape(NUM_ROWS, width)[::-1]

    def blocks(self, rows_np: np.ndarray, ends: list[int], context: int) -> HostBlocks:
        return HostBlocks((self.table[rows_np, : -(-context // BLOCK)],), (BLOCK,))


class Rows:
    def __init__(
        self,
        num_drafts: int,
        *,
        match: str = "tli",
        length: int = 200,
        drafting: str = "greedy",
        temperature: float = 0,
        contexts: tuple[int, ...] = (),
        backend: HostBackend | None = None,
    ) -> None:
        self.temperature = temperature
        self.languages = Languages("sentencepiece", "byte_level")
        self.num_drafts = num_drafts
        self.shapes = shapes(max_num_seqs=NUM_ROWS, max_tokens=32, max_len=MAX_LEN, drafts=num_drafts)
        if contexts:
            self.shapes = replace(self.shapes, contexts=contexts)
        self.backend = backend or HostBackend()
        options = dict(universal=True, universal_context="retokenize", universal_match=match)
        self.speculation = make_speculation(
            num_drafts, length, method="draft_model", rule="standard", drafting=drafting, **options
        )
        width = self.shapes.max_context + 1 + num_drafts
        sizes = dict(max_len=width, block_sizes=[BLOCK], max_context=self.shapes.max_context)
        self.requests = make_requests(self.backend, max_rows=NUM_ROWS, **sizes)
        vocab, own = (len(tokenizer) for tokenizer in self.languages.tokenizers)
        self.sampling = make_sampling(self.backend, max_rows=NUM_ROWS, vocab_size=vocab)
        pairs, device = self.languages.map, torch.device("cpu")
        spelled = np.array([(piece or b"\xff").isascii() for piece in self.languages.drafter.bytes_by_id])
        self.mapped = MappedVocabulary(pairs.target_to_draft, pairs.draftable, 0, device)
        self.translation: Translation = DrafterVocabulary(spelled, device) if match == "slem" else self.mapped
        self.model = ClosestToken(length, own)
        self.recorder = StepRecorder()
        self.drafting = TextDrafting(
            make_context(self.speculation, self.requests, self.recorder, self.shapes, self.sampling, MAX_LEN),
            proposer=RetokenizedProposer(self.model, self.translation),
            reader=self.languages.reader,
            rewriter=self.languages.rewriter() if match == "slem" else None,
            kv_region=FixedRegion(length),
            guard=Guard(independent=True),
        )
        self.recorder.expect(listed(self.drafting.jobs()))
        self.tokens: dict[str, list[int]] = {}

    def start(self, prompts: dict[str, list[int]], preempted: set[str] | None = None) -> None:
        params = SamplingParams(temperature=self.temperature, seed=1, max_tokens=500)
        new = [new_request(name, prompt, [1], params=params) for name, prompt in prompts.items()]
        counts = {name: len(prompt) for name, prompt in prompts.items()}
        self.requests.apply(step(counts, new=new, preempted=preempted))
        for request in self.requests.admitted:
            self.sampling.admit(request)
        self.drafting.apply(self.requests)
        self.tokens |= {name: list(prompt) for name, prompt in prompts.items()}

    def sample(self, answers: dict[str, list[int]], max_drafts: int | None = None) -> dict[str, list[int]]:
        """Give each named row these tokens from the target, and return the drafts that wait after them."""
        members = [self.requests.by_id[name] for name in answers]
        num_rows = self.shapes.fit_rows(len(members))
        rows_B = torch.from_numpy(self.requests.pad_rows(members, num_rows)).long()
        verification, last = sampled(list(answers.values()), num_rows), torch.zeros(num_rows).int()
        for index, (name, answer) in enumerate(answers.items()):
            last[index] = len(self.tokens[name]) - 1
            self.tokens[name] += answer
        self.requests.advance(rows_B, last, verification)
        self.sampling.flush()
        done = StepResult(members, verification)
        self.drafting.propose_on_host(done, self.num_drafts if max_drafts is None else max_drafts)
        if (drafts := self.drafting.host_drafts(members)) is not None:  # the next step copies them to the device
            self.requests.put_host_drafts(rows_B[: len(members)], torch.from_numpy(drafts))
        waiting = {name: self.waiting(name) for name in answers}
        reported = dict(zip(answers, self.drafting.get_draft_token_ids(done).draft_token_ids, strict=True))
        assert {name: len(drafts) for name, drafts in waiting.items()} == {
            name: len(reported[name]) for name in reported
        }
        return waiting

    def waiting(self, name: str) -> list[int]:
        row, length = self.requests.by_id[name].row, len(self.tokens[name])
        return self.requests.history_RM[row, length : length + int(self.requests.num_drafts_R[row])].tolist()

    def read(self, name: str) -> list[int]:
        timeline = Timeline(self.languages.reader)
        timeline.extend(self.tokens[name])
        return timeline.tokens(0)

    def own_drafts(self, name: str) -> list[int]:
        """Return the expected drafts after the whole text, in the drafter's tokens."""
        read, drafts = self.read(name), []
        for _ in range(max(min(self.num_drafts, self.model.longest - len(read)), 0)):
            hidden = torch.tensor([[following(read, self.model.vocab)]])
            drafts.append(int(self.translation.to_target(self.model.logits(hidden)).argmax()))
            read += self.translation.to_drafter(torch.tensor([drafts[-1]])).tolist()
        return drafts

    def expected(self, name: str) -> list[int]:
        drafts = self.own_drafts(name)
        if self.speculation.universal_match == "tli":
            return drafts
        timeline = Timeline(self.languages.reader)
        timeline.extend(self.tokens[name])
        return self.languages.rewriter().rewrite(drafts, timeline.open_text or "")[: len(drafts)]


TEXTS = random_texts(23, 40)


def prompts(rows: Rows) -> dict[str, list[int]]:
    """Return prompts of one token, of one chunk and of several chunks."""
    texts = [
        rows.languages.target_ids(text) for text in (TEXTS[0][:1] or "a", " ".join(TEXTS[1:3]), " ".join(TEXTS[3:6]))
    ]
    return dict(zip("abc", (ids[:110] for ids in texts), strict=True))


@pytest.mark.parametrize("match", ["tli", "slem"])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_drafts_follow_from_whole_text(match: str, num_drafts: int, seed: int, device: type[HostBackend]) -> None:
    """Whatever is accepted and scheduled; rows that skipped some steps catch up."""
    rng, drafted = random.Random(seed), 0
    rows = Rows(num_drafts, match=match, backend=device())
    rows.start(prompts(rows))
    drafts: dict[str, list[int]] = {name: [] for name in "abc"}
    for _ in range(10):
        answers = {}
        for name in rng.sample("abc", rng.randint(1, 3)):
            accepted = drafts[name][: rng.randint(0, num_drafts)]
            answers[name] = [*accepted, rng.choice(rows.languages.target_ids("a b cd e"))]
        drafts |= rows.sample(answers, max_drafts=0 if rng.random() < 0.1 else None)
        for name in answers:
            if drafts[name]:
                assert drafts[name] == rows.expected(name), name
                drafted += 1
    assert drafted > 5
    assert not rows.recorder.unexpected


def test_preempted_row_reads_its_text_again() -> None:
    rows = Rows(num_drafts=3)
    rows.start(prompts(rows))
    rows.sample({name: [7] for name in "abc"})
    known = list(rows.tokens["b"])
    rows.requests.apply(step({}, preempted={"b"}))
    rows.start({"d": rows.languages.target_ids(TEXTS[7])})  # takes the row
    rows.start({"b": known})
    assert rows.sample({"b": [8], "d": [9]}) == {"b": rows.expected("b"), "d": rows.expected("d")}


def test_row_beyond_kv_region_continues_without_drafts() -> None:
    rows = Rows(num_drafts=4, length=40)
    texts = prompts(rows)
    rows.start(texts)
    assert len(rows.read("c")) > 40
    drafts = rows.sample({"a": [7], "c": [7]})
    assert drafts == {"a": rows.expected("a"), "c": []}
    assert len(drafts["a"]) == 4

    def outgrown() -> set[str]:
        return set(rows.drafting.find_outgrown_requests())

    assert outgrown() == {"c"}
    while len(rows.read("a")) < 40:
        assert rows.sample({"a": [7]})["a"] == rows.expected("a")
        assert ("a" in outgrown()) == (len(rows.read("a")) >= 40), "it is about its newest step"
        assert "c" in outgrown(), "its next step may come later"
    for _ in range(80):  # at first it may draft again, if its end is encoded again in fewer tokens
        assert rows.sample({"a": [7]})["a"] == []
        assert outgrown() == {"a", "c"}
    rows.sample({"a": [7]}, max_drafts=0)
    assert outgrown() == {"c"}
    rows.start({"d": rows.languages.target_ids(TEXTS[7])}, preempted={"c"})  # takes the row
    assert not outgrown()


def test_drafts_are_read_for_grammars() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    rows = Rows(num_drafts=3)
    rows.start(prompts(rows))
    rows.requests.by_id["b"].params.structured_outputs = StructuredOutputsParams(regex="a*")
    members = [rows.requests.by_id["b"]]
    drafts = rows.sample({"b": [8]})["b"]
    assert rows.drafting.get_draft_token_ids(StepResult(members)).draft_token_ids == [drafts]


def test_probs_of_sampled_drafts_are_kept() -> None:
    rows = Rows(num_drafts=2, drafting="probabilistic", temperature=0.7)
    rows.start(prompts(rows))
    drafts = rows.sample({"a": [7], "b": [8]})
    for name in "ab":
        probs = rows.drafting.gather_probs(torch.tensor([rows.requests.by_id[name].row]), 2)
        read = rows.read(name)
        for probs_V, draft in zip(probs[0], drafts[name], strict=True):
            hidden = torch.tensor([[following(read, rows.model.vocab)]])
            expected = (rows.translation.to_target(rows.model.logits(hidden)) / 0.7).softmax(-1)
            torch.testing.assert_close(probs_V[None], expected)
            read += rows.translation.to_drafter(torch.tensor([draft])).tolist()


@pytest.mark.parametrize("match", ["tli", "slem"])
def test_drafter_waits_within_character(match: str) -> None:
    """Nothing is rewritten there, and a drafter that lacks the first byte cannot spell the end of the text."""
    rows = Rows(num_drafts=3, match=match)
    rows.start(prompts(rows))
    first, second = (rows.languages.target.id_by_bytes[bytes([byte])] for byte in "é".encode())
    if match == "tli":
        del rows.languages.drafter.id_by_bytes["é".encode()[:1]]
    assert rows.sample({"b": [first], "c": [7]}) == {"b": [], "c": rows.expected("c")}
    assert rows.sample({"b": [second]}) == {"b": rows.expected("b")}


def test_warm_up_covers_every_shape() -> None:
    """Also on a device with several context buckets."""
    rows = Rows(num_drafts=3, contexts=(64, 128, 384))
    run_jobs(rows.drafting.jobs(), rows.recorder)
    assert rows.recorder._seen == rows.recorder.manifest
