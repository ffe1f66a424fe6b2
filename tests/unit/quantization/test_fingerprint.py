"""The name of a model's weights: the same for a copy, another for other weights."""

import json
from pathlib import Path

import pytest

from vllm_gaudi_spec.quantization import fingerprint as module
from vllm_gaudi_spec.quantization.fingerprint import fingerprint

SIZE = 3 * module._SAMPLE


def make(folder: Path, config: dict[str, object] | None = None, weights: bytes | None = bytes(SIZE)) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 32, "vocab_size": 400} | (config or {})))
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def changed(at: int) -> bytes:
    weights = bytearray(SIZE)
    weights[at] = 1
    return bytes(weights)


def test_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    saved_again = {"transformers_version": "9.9.9", "_name_or_path": "/elsewhere"}
    name = fingerprint(make(tmp_path / "a"))
    assert len(name) == 16
    assert fingerprint(make(tmp_path / "b", saved_again)) == name


@pytest.mark.parametrize(
    ("config", "weights"),
    [({}, changed(0)), ({}, changed(SIZE - 1)), ({}, bytes(SIZE + 1)), ({"rope_theta": 1e6}, bytes(SIZE))],
    ids=["begin", "end", "size", "configuration"],
)
def test_other_model_has_a_different_fingerprint(tmp_path: Path, config: dict[str, object], weights: bytes) -> None:
    assert fingerprint(make(tmp_path / "a")) != fingerprint(make(tmp_path / "b", config, weights))


def test_fingerprint_is_empty_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a hub may have nothing, or the configuration alone."""
    assert fingerprint(make(tmp_path / "a", weights=None)) == ""
    assert fingerprint(str(tmp_path / "nowhere")) == ""
    cached: dict[str, str | None] = {"path": None}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: cached["path"])
    assert fingerprint("someone/model") == ""
    cached["path"] = make(tmp_path / "snapshot", weights=None) + "/config.json"
    assert fingerprint("someone/model") == ""
    (tmp_path / "snapshot" / "model.safetensors").write_bytes(bytes(SIZE))
    assert fingerprint("someone/model") == fingerprint(make(tmp_path / "b"))
