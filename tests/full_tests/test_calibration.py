"""Calibration with real engines: what an interrupted one measures, and what two ranks measure."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fp8_calibration import measure
from fp8_calibration.folder import ROLES, TARGET, Folder, write_prompts
from fp8_calibration.scales import SCALE_METHODS, make_scales, unify
from tests.support.processes import run
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.files import Record
from vllm_gaudi_spec.tools.io.prompts import load_prompts

ROOT = Path(__file__).parents[2]
SMALL = dict(dtype="float32", kv_cache_memory_bytes=64 << 20, enforce_eager=True, seed=0)


def prepared(root: Path, prompts: int) -> Folder:
    folder = Folder(root)
    write_prompts(folder, load_prompts(None, prompts))
    return folder


def values(record: Record) -> dict[str, list[np.ndarray]]:
    return {name: list(node.arrays()) for name, node in record.nodes.items()}


def close(one: Record, other: Record, rtol: float) -> None:
    ours, theirs = values(one), values(other)
    assert ours.keys() == theirs.keys()
    for name, arrays in ours.items():
        for a, b in zip(arrays, theirs[name], strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, err_msg=name)


def test_interrupted_measurement_resumes(
    tmp_path: Path, looping_llama: str, cousin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the prompts, and none of the others; what comes of it is what one run measures."""
    run = measure.Run(model=looping_llama, draft=cousin, method="draft_model", batch_size=4, max_tokens=8, engine=SMALL)
    whole, halves = (prepared(tmp_path / name, 12) for name in ("whole", "halves"))
    generate, asked = measure._generate, []

    def interrupted(llm: object, run: measure.Run, prompts: Sequence[str]) -> None:
        if len(asked) == 1:
            raise KeyboardInterrupt
        asked.append(len(prompts))
        generate(llm, run, prompts)

    monkeypatch.setenv("QUANT_CONFIG", str(halves.role(TARGET).measure_config))
    with monkeypatch.context() as patched:
        patched.setattr(measure, "_generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure.measure(halves, run)
    assert json.loads(halves.progress.read_text())["done"] == 4
    with monkeypatch.context() as patched:
        patched.setattr(measure, "_generate", lambda *args: (asked.append(len(args[2])), generate(*args)))
        measure.measure(halves, run)
    assert asked == [4, 4, 4]
    before = halves.progress.read_bytes()
    monkeypatch.setattr(measure, "_open", None)  # nothing is left to do
    measure.measure(halves, run)
    assert halves.progress.read_bytes() == before
    monkeypatch.undo()

    monkeypatch.setenv("QUANT_CONFIG", str(whole.role(TARGET).measure_config))
    measure.measure(whole, run)
    for name in ROLES:
        ours, theirs = (files.read_world(folder.role(name).measured) for folder in (halves, whole))
        assert ours[0].looked_at == theirs[0].looked_at
        close(ours[0], theirs[0], rtol=0)


def test_measurement_with_other_settings_is_refused(
    tmp_path: Path, looping_llama: str, cousin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it before an engine is opened."""
    folder = prepared(tmp_path, 4)
    run = measure.Run(model=looping_llama, batch_size=4, max_tokens=2, engine=SMALL)
    monkeypatch.setenv("QUANT_CONFIG", str(folder.role(TARGET).measure_config))
    measure.measure(folder, run)
    monkeypatch.setattr(measure, "_open", None)
    before = {path: path.read_bytes() for path in folder.role(TARGET).measured.parent.iterdir()}
    changes = {
        "settings": dict(max_tokens=3),
        "target": dict(model=cousin),
        "draft": dict(draft=cousin, method="draft_model"),
    }
    for what, change in changes.items():
        other = measure.Run(**{**vars(run), **change})
        with pytest.raises(files.QuantFilesError, match=f"measurements with another {what}; choose another --out"):
            measure.measure(folder, other)
    write_prompts(folder, load_prompts(None, 3))
    with pytest.raises(files.QuantFilesError, match="with another prompts"):
        measure.measure(folder, run)
    write_prompts(folder, load_prompts(None, 4))
    assert {path: path.read_bytes() for path in before} == before
    measured = Path(f"{files.stem(folder.role(TARGET).measured, 0, 1)}.json")
    measured.write_bytes(measured.read_bytes()[:1000])
    with pytest.raises(files.QuantFilesError, match="is truncated"):
        measure.measure(folder, run)


def run_step(name: str, *arguments: object) -> None:
    command = [sys.executable, str(ROOT / "calibration" / name), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = run(command, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_measure_the_same_scales_as_one(tmp_path: Path, looping_llama: str, cousin: str) -> None:
    """Put together: the same scales, within what sums in another order differ by."""
    ranks = {}
    for world in (1, 2):
        folder = prepared(tmp_path / str(world), 12)
        options = ["--draft", cousin, "--tensor-parallel-size", world, "--max-tokens", 4]
        run_step("step_3_measure.py", looping_llama, "--out", folder.root, *options, "--engine", json.dumps(SMALL))
        run_step("step_4_postprocess.py", "--out", folder.root)
        run_step("step_5_unify_ranks.py", "--out", folder.root, "--world-size", 1)
        ranks[world] = folder
    for name in ROLES:
        measured = files.read_world(ranks[2].role(name).measured)
        assert len(measured) == 2
        one, two = (files.read_world(ranks[world].role(name).final)[0] for world in (1, 2))
        close(two, one, rtol=1e-4)
        close(two, unify(measured), rtol=0)
        for method in SCALE_METHODS:
            # Rounded to bfloat16, a difference in the last bits of float32 may become one of 2**-8.
            close(make_scales([two], method, "gaudi3")[0], make_scales([one], method, "gaudi3")[0], rtol=2**-7)
