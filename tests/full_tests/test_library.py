"""What programs that use vLLM as a library reach for: the worker's runner, and weights of a running engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm import LLM, SamplingParams
from vllm.v1.worker.worker_base import WorkerBase

from tests.full_tests import tiny_models
from tests.full_tests.engines import engine, generate

PROMPTS = [[5, 6, 7], [9, 3, 200, 41], [17] * 20]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
DRAFT = dict(method="draft_model", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The looping Llama's shapes with other weights."""
    return tiny_models.save(tiny_models.looping_llama, tmp_path_factory.mktemp("other"), seed=11)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints whose output matrix is the embedding table."""

    def build() -> nn.Module:
        return tiny_models.llama(tie_word_embeddings=True)

    return [tiny_models.save(build, tmp_path_factory.mktemp("tied"), seed=seed) for seed in (0, 11)]


def texts(llm: LLM) -> list[list[int]]:
    assert llm.reset_prefix_cache()  # KV of other weights
    return [list(answer.outputs[0].token_ids) for answer in generate(llm, PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def texts_of(looping_llama: str, other_llama: str) -> dict[str, list[list[int]]]:
    """Each checkpoint's, from an engine that was started with it."""
    found = {}
    for folder in (looping_llama, other_llama):
        with engine(folder) as llm:
            found[folder] = texts(llm)
    assert found[looping_llama] != found[other_llama]
    return found


class Extension:
    """A `worker_extension_cls`: what it takes of the worker, programs written for upstream take."""

    def describe(self: Any) -> dict[str, Any]:
        runner = self.model_runner
        assert runner.model is runner.get_model() is self.get_model()
        assert runner.vllm_config is self.vllm_config
        assert runner.model_config is self.model_config
        assert runner.get_draft_model() is self.get_draft_model()
        assert runner.device.type == self.device.type
        return {"model": type(runner.model).__name__, "drafter": type(self.get_draft_model()).__name__}

    def scale_output(self: Any, factor: float) -> None:
        """As reinforcement learning puts new weights into a model."""
        rows = self.model_config.get_vocab_size()  # vLLM's matrix has padding after them
        matrix = self.model_runner.model.lm_head.weight[:rows].detach().cpu()
        self.reload_weights(weights_iterator=[("lm_head.weight", matrix * factor)])


@pytest.fixture(scope="module")
def speculating(looping_llama: str, cousin: str, texts_of: dict[str, list[list[int]]]) -> Iterator[LLM]:
    """After the engines of `texts_of`: only one may be open at a time."""
    extension = f"{__name__}.Extension"
    with engine(looping_llama, speculative_config=DRAFT | dict(model=cousin), worker_extension_cls=extension) as llm:
        yield llm


def checksums(llm: LLM) -> dict[str, str]:
    (found,) = llm.collective_rpc("compute_weight_checksums")
    return found


def test_worker_extension_finds_the_runner(speculating: LLM) -> None:
    found = {"model": "LlamaForCausalLM", "drafter": "LlamaForCausalLM"}
    assert speculating.collective_rpc("describe") == [found]
    assert speculating.collective_rpc(lambda worker: type(worker.model_runner.model).__name__) == ["LlamaForCausalLM"]
    assert speculating.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]


def test_reload_from_another_checkpoint(
    speculating: LLM, looping_llama: str, other_llama: str, texts_of: dict[str, list[list[int]]]
) -> None:
    """Texts are those of an engine that was started with it, and the first ones come back with the first weights."""
    first = checksums(speculating)
    assert texts(speculating) == texts_of[looping_llama]
    storages = speculating.apply_model(lambda model: [weight.data_ptr() for weight in model.parameters()])
    speculating.collective_rpc("reload_weights", kwargs=dict(weights_path=other_llama))
    assert texts(speculating) == texts_of[other_llama]
    assert all(digest != first[name] for name, digest in checksums(speculating).items() if "norm" not in name)
    assert speculating.apply_model(lambda model: [weight.data_ptr() for weight in model.parameters()]) == storages
    speculating.collective_rpc("update_config", args=({"model_config": {"model": looping_llama}},))
    speculating.collective_rpc("reload_weights")
    assert texts(speculating) == texts_of[looping_llama]
    assert checksums(speculating) == first


def test_reload_from_an_iterator(speculating: LLM, looping_llama: str, texts_of: dict[str, list[list[int]]]) -> None:
    """Those that it does not have stay. A matrix of another sign turns greedy choices around."""
    speculating.collective_rpc("scale_output", args=(-1.0,))
    assert texts(speculating) != texts_of[looping_llama]
    speculating.collective_rpc("scale_output", args=(-1.0,))
    assert texts(speculating) == texts_of[looping_llama]


def test_reload_of_weights_that_do_not_fit_is_refused(
    speculating: LLM, looping_llama: str, texts_of: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Files are looked at before the model is touched; whatever fails then can be mended by weights that fit."""

    def reload(**options: Any) -> None:
        speculating.collective_rpc("reload_weights", kwargs=options)

    with pytest.raises(ValueError, match=r"^The weights of .*gone cannot be read: [^\n]*\.$"):
        reload(weights_path=str(tmp_path / "gone"))
    (tmp_path / "model.bin").write_bytes(pickle.dumps(None))
    with pytest.raises(ValueError, match=r"are pickles \(model\.bin\)"):
        reload(weights_path=str(tmp_path))
    assert texts(speculating) == texts_of[looping_llama]
    for names in (dict(is_checkpoint_format=False), dict(weights_path="x", weights_iterator=[])):
        with pytest.raises(ValueError, match=r"leave (is_checkpoint_format|one) out"):
            reload(**names)
    with pytest.raises(ValueError, match=r"do not fit LlamaForCausalLM: [^\n]*restart the engine\.$"):
        reload(weights_iterator=[("lm_head.weight", torch.ones(3, 3))])
    reload()
    assert texts(speculating) == texts_of[looping_llama]


def test_reload_with_other_load_options(
    speculating: LLM, looping_llama: str, texts_of: dict[str, list[list[int]]]
) -> None:
    def update(**overrides: Any) -> None:
        speculating.collective_rpc("update_config", args=(overrides,))

    update(load_config={"load_format": "dummy"})
    with pytest.raises(
        ValueError, match="load format dummy cannot be reloaded; set another one first with update_config"
    ):
        speculating.collective_rpc("reload_weights")
    update(load_config={"load_format": "safetensors"})
    speculating.collective_rpc("reload_weights")
    assert texts(speculating) == texts_of[looping_llama]
    with pytest.raises(ValueError, match="max_model_len of model_config cannot be changed while the engine runs"):
        update(model_config={"max_model_len": 64})
    with pytest.raises(ValueError, match="takes load_config and model_config, got cache_config"):
        update(cache_config={"block_size": 64})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sleep", "Sleep mode is not supported"),
        ("discard", "Sleep mode is not supported"),
        ("profile", "profile the process from outside"),
        ("update_weights", "Weight transfer is not supported; use reload_weights"),
        ("save_tensorized_model", "use save_sharded_state"),
    ],
)
def test_unsupported_worker_calls_are_refused(name: str, words: str, speculating: LLM) -> None:
    with pytest.raises(ValueError, match=words):
        speculating.collective_rpc(name)


def test_sharded_state_has_the_bits_of_the_checkpoint(
    speculating: LLM, looping_llama: str, texts_of: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Its CPU keeps packed weights only: what is saved of them are the checkpoint's bits."""
    speculating.collective_rpc("save_sharded_state", kwargs=dict(path=str(tmp_path)))
    saved, written = (
        load_file(tmp_path / "model-rank-0-part-0.safetensors"),
        load_file(f"{looping_llama}/model.safetensors"),
    )
    for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        assert torch.equal(saved[name][: len(written[name])], written[name]), name


def sharded(llm: LLM, source: str, folder: Path) -> str:
    llm.collective_rpc("save_sharded_state", kwargs=dict(path=str(folder)))
    for path in Path(source).iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)


def test_tied_output_matrices_are_reloaded(tied: list[str], tmp_path: Path) -> None:
    """Two layers read one weight, and the checkpoint has it once. Also what was saved in between can be loaded."""
    with engine(tied[1]) as llm:
        wanted = texts(llm)
    with engine(tied[0]) as llm:
        assert texts(llm) != wanted
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=tied[1]))
        assert texts(llm) == wanted
        folder = sharded(llm, tied[1], tmp_path)
    with engine(folder, load_format="sharded_state") as llm:
        assert texts(llm) == wanted


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", dict(enable_lora=True), "leave out --enable-lora"),
    ("mixtral", {}, "does not work with experts"),
]


@pytest.mark.parametrize(("family", "options", "words"), REFUSED, ids=["lora", "experts"])
def test_reload_is_refused_for_lora_and_experts(
    family: str, options: dict[str, Any], words: str, tiny: Callable[[str], str], tmp_path: Path
) -> None:
    with engine(tiny(family), **options) as llm:
        for call in (dict(method="reload_weights"), dict(method="save_sharded_state", args=(str(tmp_path),))):
            with pytest.raises(ValueError, match=words):
                llm.collective_rpc(**call)


def test_worker_methods_have_upstream_names() -> None:
    """Fails when upstream's worker loses or renames one: then the name goes here as well."""
    from vllm.v1.worker.gpu_worker import Worker as Upstream

    from vllm_gaudi_spec.worker import Worker

    names = set(vars(Worker)) - set(vars(WorkerBase)) - {"step_report", "save_measurements", "self_test"}
    assert {name for name in names if not name.startswith("_")} - set(dir(Upstream)) == {"backend"} & names
