"""Shapes of sampling passes: there are few where each costs a graph, and every step needs a listed one."""

import random
from dataclasses import replace

import pytest
import torch

from tests.support.fakes import HostBackend
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.devices.hpu.backend import TRAITS
from vllm_gaudi_spec.runner.shapes import SampleShapes
from vllm_gaudi_spec.sampling.params import Sampling

VOCAB = 128256
MAX_GRAPHS = 40


class Gaudi(HostBackend):
    traits = replace(TRAITS, torch_device=torch.device("cpu"))


def sample_shapes(
    max_rows: int,
    max_len: int,
    num_drafts: int,
    *,
    lists: bool = True,
    rectangles: bool = False,
    max_logprobs: int = 20,
) -> tuple[SampleShapes, Sampling]:
    backend = Gaudi()
    found = SampleShapes(
        shapes(max_rows, max_len=max_len, drafts=num_drafts, backend=backend),
        max_rows=max_rows,
        lists=lists,
        needs_rectangle={False: False, True: rectangles},
    )
    sampling = Sampling(
        backend,
        max_rows=max_rows,
        vocab_size=VOCAB,
        max_logprobs=max_logprobs,
        logprobs_mode="raw_logprobs",
        joint=rectangles,
    )
    return found, sampling


def signatures(found: SampleShapes, sampling: Sampling) -> list[object]:
    return [(*shape, branch) for shape, branch in found.every(sampling.branches)]


@pytest.mark.parametrize("rectangles", [False, True])
@pytest.mark.parametrize("max_logprobs", [0, 20, 100, -1])
def test_sampling_has_few_graphs_on_a_gaudi(rectangles: bool, max_logprobs: int) -> None:
    for max_rows in (128, 256, 1000):
        for num_drafts in range(1 if rectangles else 0, 9):
            asked = sample_shapes(max_rows, 8192, num_drafts, rectangles=rectangles, max_logprobs=max_logprobs)
            listed = signatures(*asked)
            assert len(set(listed)) == len(listed) <= MAX_GRAPHS, (max_rows, num_drafts)


@pytest.mark.parametrize("rectangles", [False, True])
@pytest.mark.parametrize("lists", [False, True])
def test_every_fitted_sample_shape_is_listed(lists: bool, rectangles: bool) -> None:
    rng = random.Random(0)
    for max_rows, num_drafts in ((1, 0), (1, 3), (3, 1), (6, 4), (100, 3), (256, 5)):
        found, sampling = sample_shapes(max_rows, 1024, num_drafts, lists=lists, rectangles=rectangles)
        branches = sampling.branches
        every = set(found.every(branches))
        for _ in range(200):
            num_queries = rng.choice((1, 1 + num_drafts))
            positions = [rng.randint(1, num_queries) for _ in range(rng.randint(1, max_rows))]
            branch = rng.choice(branches)
            shape = found.fit(num_queries, positions, branch)
            assert (shape, branch) in every
            assert shape.rows >= len(positions)
            assert (shape.positions or shape.rows * shape.queries) >= sum(positions)
            assert shape.queries >= num_queries
