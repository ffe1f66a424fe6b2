"""Target and drafter of a universal drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal import pairs


@pytest.mark.parametrize(("largest", "is_refused"), [(9, False), (400_000_000, True)])
def test_tokenizer_with_a_huge_id_is_refused(largest: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of tokens by id would fill the memory. Ids up to the model's last one are padding."""
    loaded = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0, "b": largest}))
    monkeypatch.setattr(pairs, "load_tokenizer", lambda *args: loaded)
    options: dict[str, Any] = dict(tokenizer="x", tokenizer_revision=None, trust_remote_code=False)
    model = cast("Any", SimpleNamespace(model="x", get_vocab_size=lambda: 10, **options))
    if is_refused:
        with pytest.raises(UnsupportedConfigError, match=r"largest id is 400000000, .*tokenizer\.json"):
            pairs._load_tokenizer(model)
    else:
        assert pairs._load_tokenizer(model) is loaded
