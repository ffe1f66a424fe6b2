"""Lists of sizes, made by a strategy, given as options, or read from a file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.small_engine import RETOKENIZE, ROOMY, SmallEngine, Variant, greedy_text
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.config import Options, UnsupportedConfigError
from vllm_gaudi_spec.records import Shape
from vllm_gaudi_spec.runner.shapes import Buckets, geometric, round_up


def buckets(*, captures: bool = False, **given: Any) -> Buckets:
    """Return the buckets of options as a user writes them."""
    options = Options.from_vllm(SimpleNamespace(additional_config={"gaudi_spec": given}))  # type: ignore[arg-type]
    return Buckets.choose(options, SimpleNamespace(traits=SimpleNamespace(captures=captures)))  # type: ignore[arg-type]


def listed(folder: Path, content: object) -> str:
    path = folder / "buckets.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_batch_sizes_have_two_steps_per_octave() -> None:
    assert buckets().batch_sizes(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert buckets(bucket_strategy="exponential") == buckets(), "which is the default"


def test_batch_sizes_are_powers_of_two_where_each_costs_a_graph() -> None:
    assert buckets(captures=True).batch_sizes(20) == (1, 2, 4, 8, 16, 20)


@pytest.mark.parametrize("strategy", ["exponential", "linear"])
@pytest.mark.parametrize("captures", [False, True])
def test_batch_sizes_cover_every_batch_and_end_at_the_largest(strategy: str, captures: bool) -> None:
    chosen = buckets(captures=captures, bucket_strategy=strategy)
    for largest in range(1, 300):
        sizes = chosen.batch_sizes(largest)
        assert sizes[0] == 1
        assert sizes[-1] == largest
        assert all(small < large for small, large in pairwise(sizes))
        assert len(sizes) <= 18
        if strategy == "exponential":
            assert all(large <= 2 * small for small, large in pairwise(sizes)), "at most half of a step is padding"


@pytest.mark.parametrize("strategy", ["exponential", "linear"])
@pytest.mark.parametrize("smallest", [1, 16, 128])
@pytest.mark.parametrize("growth", [1.25, 2.0])
def test_growing_lists_are_multiples_that_cover_the_largest(strategy: str, smallest: int, growth: float) -> None:
    chosen = buckets(bucket_strategy=strategy)
    for largest in (1, 7, 16, 17, 100, 127, 128, 129, 1000, 2048, 8191):
        sizes = chosen.growing(smallest, largest, growth)
        assert sizes[0] == smallest
        assert sizes[-1] == round_up(max(largest, 1), smallest)
        assert all(size % smallest == 0 for size in sizes)
        assert all(small < large for small, large in pairwise(sizes))
        if strategy == "exponential":
            assert all(large <= max(small * growth, small + smallest) for small, large in pairwise(sizes))


def test_linear_lists_have_few_equal_steps() -> None:
    chosen = buckets(bucket_strategy="linear")
    assert chosen.growing(1, 64, 2.0) == (1, *range(4, 65, 4))
    assert chosen.growing(128, 2048, 1.25) == tuple(range(128, 2049, 128))
    assert chosen.growing(16, 2048, 1.25) == (16, *range(128, 2049, 128))
    assert chosen.batch_sizes(10) == tuple(range(1, 11))
    for largest in range(1, 3000):
        first, *rest = chosen.growing(1, largest, 2.0)
        assert len(rest) <= 16
        steps = {large - small for small, large in pairwise(rest[:-1])}
        assert len(steps) <= 1, "but for the last"
        assert first == 1


def test_geometric_lists_always_grow() -> None:
    assert geometric(16, 96, 1.25) == (16, 32, 48, 64, 80, 96)
    assert geometric(512, 500, 2.0) == (512,)
    assert geometric(512, 5000, 2.0) == (512, 1024, 2048, 4096, 5120)


def test_buckets_file_lists_sizes_by_name(tmp_path: Path) -> None:
    path = listed(tmp_path, {"batch": [4, 1], "blocks": [9, 3]})
    found = buckets(buckets_file=path)
    assert (found.batch, found.prefill, found.blocks) == ((1, 4), None, (3, 9))
    assert buckets(buckets_file=listed(tmp_path, {})) == buckets()


def test_option_overrides_the_buckets_file(tmp_path: Path) -> None:
    path = listed(tmp_path, {"batch": [4, 1], "prefill": [32]})
    found = buckets(buckets_file=path, batch_buckets=[1, 64], bucket_strategy="linear")
    assert (found.batch, found.prefill, found.linear) == ((1, 64), (32,), True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"buckets_file .*buckets.json cannot be read"),
        ([1, 2], r"buckets_file .*must hold lists by name, out of batch, prefill, blocks"),
        ({"batches": [1]}, r"buckets_file .*must hold lists by name, out of batch, prefill, blocks"),
        ({"batch": 4}, r"buckets_file: batch must be a list of positive integers, got 4"),
    ],
)
def test_invalid_buckets_file_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        buckets(buckets_file=listed(tmp_path, content))


def test_binary_buckets_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "buckets.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UnsupportedConfigError, match=r"buckets_file .* cannot be read"):
        buckets(buckets_file=str(tmp_path / "buckets.json"))


def test_missing_buckets_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedConfigError, match=r"additional_config.gaudi_spec.buckets_file .*gone.json cannot be"
    ):
        buckets(buckets_file=str(tmp_path / "gone.json"))


@pytest.mark.parametrize(
    ("name", "value"), [("bucket_strategy", "quadratic"), ("buckets_file", ""), ("buckets_file", 3)]
)
def test_options_of_the_wrong_type_are_refused(name: str, value: object) -> None:
    with pytest.raises(UnsupportedConfigError, match=rf"additional_config.gaudi_spec.{name} must be"):
        buckets(**{name: value})


def test_shapes_use_the_lists_of_the_file(tmp_path: Path) -> None:
    chosen = shapes(max_num_seqs=8, max_tokens=64, buckets_file=listed(tmp_path, {"batch": [8], "prefill": [64]}))
    assert (chosen.decode_rows, chosen.prefill_queries) == ((8,), (64,))


@pytest.mark.parametrize("method", [None, "ngram", "ngram_gpu", "draft_model", RETOKENIZE], ids=str)
def test_batches_beyond_short_lists_are_served(method: str | None, tmp_path: Path) -> None:
    """Batches exceed a list that ends at two rows, and prompt chunks one that ends at 8 tokens. The engine checks every
    step."""
    engine = SmallEngine(Variant(method, num_blocks=ROOMY, short_lists=True), tmp_path)
    prompts = {f"r{size}": [7 + size % 3] * size for size in (3, 18, 19, 20, 2)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    with torch.inference_mode():
        engine.finish()
    assert engine.texts == {name: greedy_text(prompt, 24) for name, prompt in prompts.items()}
    late = [signature for signature in engine.runner.recorder.unexpected if isinstance(signature, Shape)]
    assert {shape.phase for shape in late} == {"decode", "prefill"}
