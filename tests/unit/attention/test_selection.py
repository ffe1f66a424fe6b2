"""Layers that select keys, in both forms of paged attention, against dense attention over a sorted selection."""

from dataclasses import replace

import pytest
import torch

from tests.unit.attention.test_paged_attention import FORMS, Scene, make_scene
from vllm_gaudi_spec.attention.metadata import AttentionCall, IndexQueries
from vllm_gaudi_spec.attention.selection import select

HEADS, LATENT, INDEX, INDEX_HEADS = 4, 56, 24, 7  # not a multiple of the heads that are scored at a time


def make(starts: list[int], queries: int, number: int, real: list[int] | None = None) -> tuple[Scene, AttentionCall]:
    scene = make_scene(starts, queries, heads=HEADS, kv_heads=1, head_size=LATENT + INDEX, value_size=40, real=real)
    scene.spec = replace(scene.spec, num_selected=number, index_size=INDEX)
    scene.query_BQHD[..., LATENT:] = 0
    generator = torch.Generator().manual_seed(1)
    num_tokens = scene.call.num_rows * queries
    index = IndexQueries(
        torch.randn(num_tokens, INDEX_HEADS, INDEX, generator=generator),
        torch.randn(num_tokens, INDEX_HEADS, generator=generator),
    )
    return scene, scene.call.replace_index(index)


def expected(scene: Scene, call: AttentionCall, row: int, query: int) -> torch.Tensor:
    """Return [H, output size] in float64, from the keys with the highest scores."""
    blocks, position = scene.blocks[row], scene.starts[row] + query
    keys = torch.cat([scene.keys[blocks[place]] for place in range(max(blocks) + 1)])[: position + 1, 0].double()
    token = row * call.num_queries + query
    products = (call.index.query_TIR[token].double() @ keys[:, LATENT:].T).relu()
    scores = (products * call.index.weights_TI[token].double()[:, None]).sum(0)
    keys = keys[scores.sort(descending=True, stable=True).indices[: scene.spec.num_selected]]
    weights = (scene.query_BQHD[row, query].double() @ keys.T * scene.spec.scale).softmax(-1)
    return weights @ keys[:, : scene.spec.output_size]


def check(scene: Scene, call: AttentionCall) -> None:
    for name, form in FORMS.items():
        out = scene.attend(form, replace(call, _plans={}))
        for row, real in enumerate(scene.real):
            for query in range(real):
                torch.testing.assert_close(
                    out[row, query].double(), expected(scene, call, row, query), atol=2e-5, rtol=0.0, msg=name
                )


@pytest.mark.parametrize("number", [1, 8, 32, 100, 1000])
@pytest.mark.parametrize("queries", [1, 4])
def test_keys_with_the_highest_scores_are_read(number: int, queries: int) -> None:
    """Fewer keys than a row has, as many, and more than any row has."""
    check(*make([0, 7, 31, 64, 200], queries, number, real=[queries, 1, queries, 1, queries]))


def test_first_of_equal_scores_are_selected() -> None:
    scores = torch.tensor([[[3.0, 0.0, -0.0, 5.0, 0.0, -1.0]]])
    wanted = [True, True, True, True, False, False]
    assert select(scores, 4)[0, 0].tolist() == wanted
    longer = torch.cat((scores, torch.full((1, 1, 50), torch.finfo().min)), dim=-1)
    assert select(longer, 4)[0, 0].tolist() == wanted + [False] * 50
