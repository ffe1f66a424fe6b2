"""The engine process is forked only if a forked child can compute."""

import os
from pathlib import Path

import pytest

from tests.support.processes import run_code
from vllm_gaudi_spec import environment
from vllm_gaudi_spec.devices.cpu import fork
from vllm_gaudi_spec.environment import OPENMP


@pytest.mark.parametrize(
    ("before", "method", "patience"), [("", "fork", 300), ("torch.ones(1 << 22).exp_();", "spawn", 2)]
)
def test_start_method(before: str, method: str, patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the child is long enough for a busy machine."""
    # Another test may have preloaded Intel's OpenMP, which survives a fork.
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    code = f"import torch; torch.set_num_threads(2); {before}"
    code += f"from vllm_gaudi_spec.devices.cpu import fork; fork._PATIENCE_S = {patience}; print(fork.start_method(1))"
    result = run_code(code, check=True)
    assert result.stdout.split()[-1] == method


def test_ranks_with_intels_openmp_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "_has_threads", False)
    monkeypatch.setattr(fork, "_forked_child_can_compute", lambda: True)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert [fork.start_method(ranks) for ranks in (1, 2)] == ["fork", "fork"]
    monkeypatch.setattr(fork, "_has_intels_openmp", lambda: True)
    monkeypatch.setenv("LD_PRELOAD", f"/lib/other.so:{OPENMP}")
    assert [fork.start_method(ranks) for ranks in (1, 2)] == ["fork", "spawn"]


@pytest.mark.parametrize(
    ("preloaded", "added"), [(None, True), ("/lib/other.so", True), ("/lib/libgomp.so.1", False), (OPENMP, False)]
)
def test_intels_openmp_is_preloaded_unless_another_is(
    preloaded: object, added: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = {} if preloaded is None else {"LD_PRELOAD": str(preloaded)}
    monkeypatch.setattr(os, "environ", dict(before))
    monkeypatch.setattr(environment, "OPENMP", tmp_path / "libiomp5.so")
    environment.preload_openmp()
    assert os.environ == before, "it is not installed"
    environment.OPENMP.touch()
    environment.preload_openmp()
    expected = ":".join(filter(None, (before.get("LD_PRELOAD"), str(environment.OPENMP))))
    assert os.environ == ({"LD_PRELOAD": expected, "KMP_BLOCKTIME": "1"} if added else before)
