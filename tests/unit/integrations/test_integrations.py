"""What stands in for us beside other platforms: it stays out of ours, and knows which releases it is made for."""

import logging

import pytest
import vllm
from vllm.config import SpeculativeConfig

import vllm_gaudi_spec
from tests.support.processes import run_code
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.integrations import vllm_ascend
from vllm_gaudi_spec.integrations.vllm_ascend import versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The pair that it is made for, as its users have it: vLLM is built without a device of its own."""
    monkeypatch.setattr(versions, "version", lambda name: {"vllm-ascend": "0.23.0.post1"}[name])
    monkeypatch.setattr(vllm, "__version__", "0.23.0+empty")
    return monkeypatch


@pytest.mark.parametrize("ascend", ["0.23.0", "0.23.0.post2", "0.24.0rc1", "0.18.0"])
def test_unsupported_vllm_ascend_is_named(installed: pytest.MonkeyPatch, ascend: str) -> None:
    installed.setattr(versions, "version", lambda name: ascend)
    reason = versions.explain_unsupported()
    assert reason is not None
    assert "works with vllm-ascend 0.23.0.post1 and vLLM 0.23.0;" in reason
    assert f"installed are vllm-ascend {ascend} and vLLM 0.23.0+empty." in reason


def test_unsupported_releases_refuse_only_universal_draft(installed: pytest.MonkeyPatch) -> None:
    # As vllm-ascend finds it, whatever our own platform's patches made of it before; and as it was, when this ends.
    bare = getattr(SpeculativeConfig.__init__, "__wrapped__", SpeculativeConfig.__init__)
    installed.setattr(SpeculativeConfig, "__init__", bare)
    installed.setattr(vllm, "__version__", "0.24.0")
    said: list[str] = []
    installed.setattr(logging.getLogger("vllm"), "info", lambda text, *values: said.append(text % values))
    for _ in range(2):
        vllm_ascend.register()
    refusal = "does not add universal_draft to vllm-ascend: Method universal_draft works with"
    assert all(refusal in line for line in said)
    assert len(said) == 2
    with pytest.raises(UnsupportedConfigError, match=r"works with vllm-ascend 0\.23\.0\.post1 and vLLM 0\.23\.0;"):
        SpeculativeConfig(method="universal_draft", model="some/model", num_speculative_tokens=2)
    assert SpeculativeConfig(method="ngram", num_speculative_tokens=2).method == "ngram"


def test_our_platform_is_not_imported_with_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vLLM is another, which neither upstream/ nor the platform's modules are made for."""
    registered: list[bool] = []
    monkeypatch.setattr(
        "vllm.platforms.current_platform", type("NPUPlatform", (), {"__module__": "vllm_ascend.platform"})()
    )
    monkeypatch.setattr("vllm_gaudi_spec.upstream.apply", lambda: registered.append(False))
    monkeypatch.setattr(vllm_ascend, "register", lambda: registered.append(True))
    assert vllm_ascend.is_active()
    vllm_gaudi_spec.general_plugin()
    assert registered == [True]


def test_integration_imports_nothing_specific_to_our_vllm() -> None:
    """The plugins' way until vllm-ascend is asked for anything: none of our modules that use our vLLM's own."""
    code = (
        "import sys; from vllm_gaudi_spec.integrations.vllm_ascend import patches, versions;"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'vllm' or 'vllm_ascend' in m))"
    )
    result = run_code(code, check=True)
    assert result.stdout.strip() == str(
        [
            "vllm_gaudi_spec.integrations.vllm_ascend",
            "vllm_gaudi_spec.integrations.vllm_ascend.patches",
            "vllm_gaudi_spec.integrations.vllm_ascend.versions",
        ]
    )
