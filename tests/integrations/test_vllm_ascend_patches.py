"""What is changed in vllm-ascend 0.23 and its vLLM: these fail when upstream moves; then review the patch."""

import inspect
import pickle
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import vllm
from vllm.config import SpeculativeConfig
from vllm.config import speculative as upstream_speculative
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerBase
from vllm_ascend import spec_decode
from vllm_ascend.platform import NPUPlatform

import vllm_gaudi_spec
from tests.integrations.scene import configuration
from vllm_gaudi_spec.config import IS_UNIVERSAL, UnsupportedConfigError
from vllm_gaudi_spec.integrations import vllm_ascend as integration
from vllm_gaudi_spec.integrations.vllm_ascend import patches, versions


def test_vllm_ascend_is_the_platform_and_ours_stays_out() -> None:
    assert isinstance(current_platform, NPUPlatform)
    assert integration.is_active()
    assert vllm_gaudi_spec.platform_plugin() is None


def test_these_are_the_releases_that_it_is_made_for() -> None:
    assert vllm.__version__ == versions.VLLM
    assert versions.version("vllm-ascend") == versions.VLLM_ASCEND
    assert versions.explain_unsupported() is None


def depth(function: Any) -> int:
    wrapped = getattr(function, "__wrapped__", None)
    return 0 if wrapped is None else 1 + depth(wrapped)


def values_of_method() -> list[str]:
    return list(get_args(get_args(SpeculativeConfig.__dataclass_fields__["method"].type)[0]))


def test_registering_again_changes_nothing() -> None:
    """vLLM's own loading of plugins was the first time."""
    places = [
        (SpeculativeConfig, "__post_init__"),
        (SpeculativeConfig, "verify_equal_vocab_size_if_draft_model"),
        (WorkerBase, "__init__"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    vllm_gaudi_spec.general_plugin()
    vllm_gaudi_spec.general_plugin()
    assert [getattr(owner, name) for owner, name in places] == before
    assert [depth(function) for function in before] == [1, 1, 1]
    assert values_of_method().count("universal_draft") == 1


def test_upstream_has_no_such_method_and_no_flag() -> None:
    """Fails when it has one: then its meaning is compared, and this integration may have done its work."""
    assert "universal_draft" not in str(upstream_speculative.SpeculativeMethod)
    assert "use_heterogeneous_vocab" not in SpeculativeConfig.__dataclass_fields__
    assert "universal" not in inspect.getsource(spec_decode)


def test_the_method_is_taken_for_a_draft_model_with_its_own_tokenizer(folders: dict[str, str]) -> None:
    config = configuration(folders["target"], folders["drafter"])
    for found in (config.speculative_config, pickle.loads(pickle.dumps(config)).speculative_config):
        assert found.method == "draft_model"
        assert getattr(found, IS_UNIVERSAL)
        assert found.draft_model_config.tokenizer == folders["drafter"]
        assert found.target_model_config.tokenizer == folders["target"]


def test_other_methods_are_what_they_were(folders: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="same vocabulary size"):
        configuration(folders["target"], folders["drafter"], "draft_model")
    with pytest.raises(ValueError, match=r"'ngram'.*'universal_draft'"):
        configuration(folders["target"], folders["drafter"], "universal_drift")
    found = configuration(folders["target"], folders["target"], "draft_model").speculative_config
    assert not patches.is_universal(found)
    assert found.draft_model_config.tokenizer == folders["target"]


OPTIONS_PAST_THE_MAPPING: list[dict[str, Any]] = [
    {"draft_sample_method": "probabilistic"},
    {"use_local_argmax_reduction": True},
    {"parallel_drafting": True},
]


@pytest.mark.parametrize("option", OPTIONS_PAST_THE_MAPPING)
def test_options_that_it_can_not_heed_are_refused(folders: dict[str, str], option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"leave {next(iter(option))} out"):
        configuration(folders["target"], folders["drafter"], speculative=option)


def test_the_second_model_runner_is_refused(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend falls back to the first where vLLM is 0.23, with a warning."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UnsupportedConfigError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        configuration(folders["target"], folders["drafter"])


def test_a_head_is_no_drafter_of_its_own(folders: dict[str, str], tmp_path: Any) -> None:
    head = tmp_path / "some-eagle-head"
    head.symlink_to(folders["drafter"])
    with pytest.raises(UnsupportedConfigError, match="needs one"):
        configuration(folders["target"], str(head))


def test_a_worker_teaches_what_makes_proposers(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ascend.worker import model_runner_v1
    from vllm_ascend.worker.worker import NPUWorker

    assert issubclass(NPUWorker, WorkerBase)
    assert "super().__init__(" in inspect.getsource(NPUWorker.__init__)
    assert "get_spec_decode_method(self.speculative_config.method, self.vllm_config" in inspect.getsource(
        model_runner_v1.NPUModelRunner._get_drafter
    )
    modules = (spec_decode, model_runner_v1)
    plain = spec_decode.get_spec_decode_method
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    for module in modules:
        monkeypatch.setattr(module, "get_spec_decode_method", plain)
    configs = [configuration(folders["target"], folders[name], method) for name, method in CASES]
    WorkerBase(configs[0], 0, 0, "")
    assert [module.get_spec_decode_method for module in modules] == [plain, plain]
    for _ in range(2):
        WorkerBase(configs[1], 0, 0, "")
        assert [depth(module.get_spec_decode_method) for module in modules] == [1, 1]


CASES = [("target", "draft_model"), ("drafter", "universal_draft")]


def test_a_method_by_its_name_is_still_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace())
    with pytest.raises(ValueError, match="Unknown speculative decoding method: mystery"):
        patches._get_spec_decode_method(spec_decode.get_spec_decode_method, "mystery", config, None, None)
