"""Whose code a configuration trusts: these fail when upstream asks for itself; then review the patch."""

import inspect
import json
from pathlib import Path

import pytest
from vllm.config import SpeculativeConfig, VllmConfig

from tests.unit.test_config import engine_config
from vllm_gaudi_spec import config, environment, upstream

# A drafter's configuration that is made by a class in its own folder. Reading the class leaves a file behind.
OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "llama-of-its-own"
"""


def drafter_with_code(folder: Path, model_type: str) -> Path:
    """Its folder; the code leaves `ran` in it. What `model_type` says is known to transformers, or not."""
    engine_config(folder, None)
    (folder / "own_code.py").write_text(OWN_CODE.format(marker=str(folder / "ran")))
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": model_type, "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def with_trusted_target(folder: Path, draft: Path) -> VllmConfig:
    return engine_config(folder, dict(method="draft_model", model=str(draft)), trust_remote_code=True)


def test_trust_in_the_target_is_no_trust_in_its_drafter(tmp_path: Path) -> None:
    upstream.apply()
    known = drafter_with_code(tmp_path / "known", "llama")
    made = with_trusted_target(tmp_path / "target", known)
    assert made.model_config.trust_remote_code
    assert not made.speculative_config.draft_model_config.trust_remote_code
    assert not (known / "ran").exists()

    unknown = drafter_with_code(tmp_path / "unknown", "llama-of-its-own")
    with pytest.raises(config.UnsupportedConfigError, match=f"unknown in .* set {environment.TRUST_DRAFT_CODE.name}=1"):
        with_trusted_target(tmp_path / "target", unknown)
    assert not (unknown / "ran").exists()


def test_a_drafter_is_trusted_when_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which also shows that the code in these tests would run."""
    upstream.apply()
    draft = drafter_with_code(tmp_path / "draft", "llama")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv(environment.TRUST_DRAFT_CODE.name, "1")
    assert with_trusted_target(tmp_path / "target", draft).speculative_config.draft_model_config.trust_remote_code
    assert (draft / "ran").exists()
    made = engine_config(tmp_path / "target", dict(method="draft_model", model=str(draft)))
    assert not made.speculative_config.draft_model_config.trust_remote_code, "by itself it means nothing"


@pytest.mark.parametrize(
    ("given", "revision", "is_trusted"),
    [
        ({}, "looked-at", True),
        (dict(revision="looked-at", code_revision="code"), "looked-at", True),
        (dict(revision="other", code_revision="code"), "other", False),
        (dict(revision="looked-at"), "looked-at", False),
    ],
)
def test_the_targets_own_name_is_read_at_the_targets_revision(
    given: dict[str, str], revision: str, is_trusted: bool, tmp_path: Path
) -> None:
    """A hub's main branch may have other code by now than what was trusted."""
    upstream.apply()
    drafter = dict(method="draft_model", model=str(tmp_path), **given)
    pinned = dict(revision="looked-at", code_revision="code")
    made = engine_config(tmp_path, drafter, trust_remote_code=True, **pinned)
    draft = made.speculative_config.draft_model_config
    assert (draft.revision, draft.trust_remote_code) == (revision, is_trusted)
    assert draft.code_revision == (given.get("code_revision") if given else "code")


def test_upstream_still_hands_the_targets_trust_on() -> None:
    source = inspect.getsource(inspect.unwrap(SpeculativeConfig.__post_init__))
    assert "trust_remote_code=self.target_model_config.trust_remote_code" in source
    assert "trust_remote_code" not in SpeculativeConfig.__dataclass_fields__
