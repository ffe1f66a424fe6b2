"""The scripts of calibration/ on files: what they make, and their messages about files that are not right."""

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8_calibration.folder import DRAFT, ROLES, TARGET, Folder
from fp8_calibration.scales import SCALE_METHODS, expand
from fp8_calibration.writing import write_files
from tests.support.measurements import measured, same
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.files import Node
from vllm_gaudi_spec.quantization.fingerprint import fingerprint

SCRIPTS = Path(__file__).parents[3] / "calibration"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, stdout and stderr of a script."""

    def run(script: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [script, *map(str, arguments)])
        status = runpy.run_path(str(SCRIPTS / f"{script}.py"))["main"]()
        return (status, *capsys.readouterr())

    return run


def make_model(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 32}))
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    return {name: make_model(tmp_path / f"{name}-model", name.encode() * 99) for name in ROLES}


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, str]) -> Folder:
    """Two ranks measured a target and a drafter."""
    folder = Folder(tmp_path / "calibration")
    for seed, name in enumerate(ROLES):
        for record in expand(measured(seed, fingerprint(models[name])), 2):
            write_files(folder.role(name).measured, record)
    return folder


def tree(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def options_of(folder: Folder, models: dict[str, str]) -> list[object]:
    return ["--out", folder.root, "--model", models[TARGET], "--draft", models[DRAFT]]


def test_from_two_ranks_to_the_scales_of_four(run: Run, folder: Folder, models: dict[str, str]) -> None:
    assert run("step_1_detect_device", "--out", folder.root, "--card", "gaudi3")[0] == 0
    assert run("step_4_postprocess", *options_of(folder, models))[0] == 0
    assert run("step_5_unify_ranks", "--out", folder.root, "--world-size", 4)[0] == 0
    status, out, err = run("step_6_make_scales", *options_of(folder, models), "--exclude", "down_proj")
    assert (status, err) == (0, "")
    for name in ROLES:
        role = folder.role(name)
        assert len(files.read_world(role.final, 4)) == 4
        for method in SCALE_METHODS:
            config = json.loads(role.quant_config(method).read_text())
            assert f"QUANT_CONFIG={role.quant_config(method)}" in out
            assert config["blocklist"]["names"] == ["down_proj"]
            for record in files.read_world(config["dump_stats_path"], 4, config["scale_method"]):
                assert (record.mode, record.device) == (files.SCALED, "gaudi3")
                assert record.model == fingerprint(models[name])
                assert len(record.nodes) == 2 * 8
    before = tree(folder.root)
    for script, options in [("step_4_postprocess", []), ("step_5_unify_ranks", ["--world-size", 4])]:
        assert run(script, "--out", folder.root, *options)[0] == 0
    assert tree(folder.root) == before


def test_matmuls_get_the_range_of_their_cache(run: Run, folder: Folder) -> None:
    keys, values = (f"model.layers.0.self_attn.attn.impl.{kind}" for kind in ("matmul_qk", "matmul_av"))
    role = folder.role(TARGET)
    for record in files.read_world(role.measured):
        for name in (keys, values):
            record.nodes[name].inputs[1] = np.full((1, 1), 1e6, np.float32)  # what stands in padding
        write_files(role.measured, record)
    assert run("step_4_postprocess", "--out", folder.root)[0] == 0
    for record in files.read_world(role.processed):
        same(record, files.read(files.stem(role.processed, record.rank, 2)))
        for name, cache in ((keys, "k_cache"), (values, "v_cache")):
            read_from = record.nodes[f"{name.rpartition('.')[0]}.{cache}"]
            np.testing.assert_array_equal(record.nodes[name].inputs[1], read_from.inputs[0])


def test_a_module_that_saw_nothing(run: Run, folder: Folder) -> None:
    role = folder.role(DRAFT)
    for record in files.read_world(role.measured):
        nothing = Node([np.zeros((1, 1), np.float32)], [], {"weight": np.ones((1, 1), np.float32)})
        changed = replace(record, nodes=record.nodes | {"model.fc": nothing})
        write_files(role.measured, replace(changed, looked_at=[*changed.nodes, "lm_head"]))
    before = tree(folder.root)
    status, _, err = run("step_4_postprocess", "--out", folder.root)
    assert status == 1
    assert "2 of 20 modules saw no value, including model.fc and lm_head" in err
    assert tree(folder.root) == before
    status, _, err = run("step_4_postprocess", "--out", folder.root, "--allow-unseen")
    assert status == 0
    assert "warning: model.fc saw no value" in err
    assert run("step_5_unify_ranks", "--out", folder.root)[0] == 0
    assert run("step_6_make_scales", "--out", folder.root, "--card", "gaudi2")[0] == 0
    config = json.loads(role.quant_config("maxabs_hw").read_text())
    assert config["blocklist"]["names"] == [r"^model\.fc$", "^lm_head$"]


STEPS = ["step_4_postprocess", "step_5_unify_ranks", "step_6_make_scales"]


@pytest.mark.parametrize("script", STEPS)
def test_another_model_stops_a_step(
    run: Run, folder: Folder, models: dict[str, str], tmp_path: Path, script: str
) -> None:
    run("step_1_detect_device", "--out", folder.root)
    for earlier in STEPS[: STEPS.index(script)]:
        assert run(earlier, "--out", folder.root)[0] == 0
    before = tree(folder.root)
    status, _, err = run(script, "--out", folder.root, "--model", make_model(tmp_path / "other", b"tuned further"))
    assert status == 1
    assert err.count("\n") == 1
    assert "was measured on a different model than" in err
    assert tree(folder.root) == before


def test_prompts(run: Run, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    source = tmp_path / "mine.jsonl"
    source.write_text('"one"\n\n{"prompt": "two\\nlines"}\n{"text": "three", "id": 3}\n')
    assert run("step_2_prepare_prompts", "--out", folder.root, "--prompts", source)[0] == 0
    lines = [json.loads(line) for line in folder.prompts.read_text().splitlines()]
    assert lines == [{"prompt": "one"}, {"prompt": "two\nlines"}, {"prompt": "three"}]
    (tmp_path / "a.txt").write_text("two\nlines\n\n")
    assert run("step_2_prepare_prompts", "--out", folder.root, "--prompts", tmp_path)[0] == 0
    assert json.loads(folder.prompts.read_text()) == {"prompt": "two\nlines\n"}, "the editor's line break is no text"
    assert run("step_2_prepare_prompts", "--out", folder.root, "--limit", 5)[0] == 0
    assert len(folder.prompts.read_text().splitlines()) == 5
