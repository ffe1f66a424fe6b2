"""The command line without an engine: options, workload, counting, conclusions, and the comparison of verify-gaudi."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import verify_device
from tests.support import records
from tests.support.processes import ROOT
from vllm_gaudi_spec import devices, versions
from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.calibration import steps
from vllm_gaudi_spec.tools.cli import check_device, check_engine, completion, counting, demo, graph_check

LIMITS = check_engine.Limits(vocab=300, max_model_len=512, max_num_seqs=4)
WORDS = tuple(range(3, 200))


# ---- options -------------------------------------------------------------------------------------------------


HEAVY = ("vllm", "torch", "numpy", "transformers", "rich", "jinja2", "tqdm")


@pytest.mark.parametrize("command", ["", *cli._COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        f"import sys\nfrom vllm_gaudi_spec.tools import cli\ntry: cli.main([*{command.split()}, '--help'])\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for word in ("xit status",) if command != "completion" else ('eval "$(gaudi-spec completion bash)"',):
        assert word in done.stdout
    if command not in ("", "chat", "completion"):
        assert "--json" in done.stdout


def test_commands_run_where_numpy_is_all_there_is(tmp_path: Path) -> None:
    """Nothing but the standard library, to report that something is missing."""
    code = (
        "import sys\nfrom vllm_gaudi_spec.tools import cli\n"
        "sys.exit(cli.main(['demo']) + 10 * cli.main(['doctor', '--json']))"
    )
    bare = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(bare, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 12, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "gaudi-spec demo: error: vLLM is not installed here; run `make setup`"
    )
    assert json.loads(done.stdout)["findings"][1]["text"] == "is not installed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speculative-config", "{"], "is not JSON"),
        (["--additional-config", "[1]"], "is not a JSON object"),
        (["--max-model-len", "10"], "64 or more"),
        (["--max-num-seqs", "0"], "1 or more"),
        (["--requests", "many"], "1 or more"),
        (["--seed", "-1"], "0 or more"),
        (["--device", "tpu"], "invalid choice"),
        (["--dtype", "int8"], "invalid choice"),
        (["/no/such/model"], "there is no model folder /no/such/model"),
        (["--speculative-config", '{"method": "draft_model", "model": "./no"}'], "there is no model folder ./no"),
        (["--json", "/no/such/folder/file.json"], "there is no folder /no/such/folder"),
        (["--json", "/tmp"], "--json /tmp is a folder; name a file"),
        (["--device", "hpu"], "needs the vendor's image with habana_frameworks"),
        (["--device", "ascend"], "needs the vendor's image with torch_npu"),
    ],
)
def test_wrong_options_end_with_status_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_bridge(name: str) -> object:
        return None if name in ("habana_frameworks", "torch_npu") else object()

    monkeypatch.setattr(devices, "find_spec", no_bridge)
    monkeypatch.setattr(graph_check, "become", lambda command: pytest.fail(f"{command} was started"))
    try:
        status = cli.main(["graph-check", *arguments])
    except SystemExit as exit_:
        status = int(str(exit_.code))
    assert status == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_engine_starts_in_the_environment_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def become(command: list[str]) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr(graph_check, "become", become)
    arguments = ["graph-check", "some/model", "--requests", "3"]
    assert cli.main(arguments) == 0
    (command,) = started
    python = command.index(sys.executable)
    settings = dict(word.split("=", 1) for word in command[1:python])
    assert command[0] == "env"
    assert settings["VGS_DEVICE"] == "hpu-emulated"
    assert "PT_HPU_LAZY_MODE" not in settings  # either mode is checked
    assert settings["VGS_SKIP_WARMUP"] == settings["VGS_SELF_TEST"] == "0"
    assert settings["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert command[python + 1 :] == ["-P", "-m", "vllm_gaudi_spec.tools.cli.check_engine", *arguments]


# ---- output ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [["completion", "bash"], ["doctor", "--json"]], ids=["short", "flushed"])
def test_a_reader_that_goes_away(options: list[str]) -> None:
    """As with `| head`: nothing on stderr, and status 1."""
    code = (
        "import sys\nfrom vllm_gaudi_spec.tools import cli\nfrom vllm_gaudi_spec.tools.doctor import examine\n"
        "examine.probe = lambda pair: []\nsys.exit(cli.main(sys.argv[1:]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end) as gone:
        done = subprocess.run(
            [sys.executable, "-c", code, *options], stdout=gone, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_file_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/full is a full disk."""
    monkeypatch.setattr("vllm_gaudi_spec.tools.doctor.examine.probe", lambda pair: [])
    assert cli.main(["doctor", "--json", "/dev/full"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "gaudi-spec doctor: error: --json /dev/full cannot be written: No space left on device"


# ---- demo ------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    commands: list[list[str]] = []

    def become(command: list[str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(demo, "become", become)
    monkeypatch.chdir(tmp_path)
    return commands


def test_demo_is_the_comparison_with_options_of_its_own(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LD_PRELOAD", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(demo, "OPENMP", tmp_path)
    assert cli.main(["demo", "--osl", "7"]) == 0
    (command,) = started
    python = command.index(sys.executable)
    settings = dict(word.split("=", 1) for word in command[1:python])
    assert settings["LD_PRELOAD"] == str(tmp_path)
    assert settings["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert command[python + 1 : python + 4] == ["-P", "-m", "vllm_gaudi_spec.tools.compare"]
    arguments = command[python + 4 :]
    assert arguments[-2:] == ["--osl", "7"]  # the user's arguments come last
    assert arguments.count("--osl") == 1
    assert arguments[arguments.index("--num-spec-tokens") + 1] == "3"
    assert arguments[arguments.index("--report") + 1] == ".demo/report.html"
    assert (tmp_path / ".demo").is_dir()
    assert arguments[arguments.index("--num-prompts") + 1] == "4"
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    assert cli.main(["demo", "--prompts", str(tmp_path)]) == 0
    assert not any(word.startswith("LD_PRELOAD") for word in started[1])
    assert "--num-prompts" not in started[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "ngram", "--draft_model", "some/model"], "needs no draft model"),
        (["--model", "/no/such"], "there is no model folder /no/such"),
        (["--acceptance", "synthetic"], "need each other"),
        (["--json", "/no/such/folder/run.json"], "there is no folder /no/such/folder"),
        (["--report", "/no/such/folder/page.html"], "there is no folder /no/such/folder for --report"),
    ],
)
def test_wrong_options_of_demo(
    options: list[str], words: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gaudi-spec demo: error: ")
    assert words in line
    assert not started


def test_demo_where_its_folder_can_not_be_made(
    started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".demo").touch()
    assert cli.main(["demo"]) == 2
    assert "the folder .demo cannot be made here: File exists; give --json FILE" in capsys.readouterr().err
    assert not started
    assert cli.main(["demo", "--json", "run.json", "--report", "page.html"]) == 0


@pytest.mark.parametrize("command", [["demo"], ["selftest"], ["graph-check"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("release", "words"),
    [
        (None, "vLLM is not installed here; run `make setup`"),
        ("0.31.2", "works with vLLM 0.32, and 0.31.2 is installed"),
    ],
)
def test_commands_that_run_vllm_report_that_it_is_missing_or_another(
    command: list[str],
    release: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(versions, "installed_vllm", lambda: release)
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("missing", "words"),
    [("jinja2", ["report", "run.json"]), ("rich", ["doctor"])],
)
def test_a_package_of_the_command_line_that_is_missing(missing: str, words: list[str], tmp_path: Path) -> None:
    """Both are required: where they are missing all the same, one line reports it."""
    (tmp_path / "run.json").write_text(json.dumps(records.run()))
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from vllm_gaudi_spec.tools import cli\nfrom vllm_gaudi_spec.tools.doctor import examine\n"
        "examine.probe = lambda pair: []\nsys.stdout.isatty = lambda: True\nsys.exit(cli.main(sys.argv[1:]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"gaudi-spec {words[0]}: error: {missing} is not installed; run `make setup`, or pip install {missing}\n"
    )


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("habana_frameworks.torch", "habana_frameworks is not installed; use the card's vendor's image, which has it"),
        ("torch_npu", "torch_npu is not installed; use the card's vendor's image, which has it"),
        ("yaml", "yaml is not installed; run `make setup`"),  # PyYAML: pip knows no yaml
        ("numpy", "numpy is not installed; run `make setup`, or pip install numpy"),
    ],
)
def test_pip_is_named_only_for_what_it_knows_by_that_name(
    missing: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    assert cli.output.guarded("doctor", work) == 1
    assert capsys.readouterr().err == f"gaudi-spec doctor: error: {remedy}\n"
    with pytest.raises(ModuleNotFoundError):
        cli.output.guarded("graph-check", work, verbose=True)


def test_verbose_shows_who_wants_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(cli.graph_check, "start", start)
    assert cli.main(["graph-check"]) == 1
    with pytest.raises(ModuleNotFoundError):
        cli.main(["graph-check", "--verbose"])
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(check_engine.WrongOptions, match=r"vLLM does not load here: .*; run `make setup`"):
        check_engine.open_engine(cli.make_parser().parse_args(["graph-check"]))
    with pytest.raises(ModuleNotFoundError):
        check_engine.open_engine(cli.make_parser().parse_args(["graph-check", "--verbose"]))


def test_verbose_shows_where_a_command_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("deep inside")

    for command, module, words in (("graph-check", check_engine, ["some/model"]), ("selftest", check_device, [])):
        monkeypatch.setattr(module, "check", fail)
        options = cli.make_parser().parse_args([command, *words])
        assert module.checked(options) != 0
        assert "deep inside" in capsys.readouterr().err
        options.verbose = True
        with pytest.raises(ValueError, match=r"^deep inside$"):
            module.checked(options)
    assert steps.exit_status("tune", fail) == 1
    assert capsys.readouterr().err == "tune: error: deep inside\n"
    with pytest.raises(ValueError, match=r"^deep inside$"):
        steps.exit_status("tune", fail, verbose=True)


def test_verbose_shows_where_an_engine_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise ValueError("deep inside")

    monkeypatch.setattr("vllm.LLM", refuse)
    monkeypatch.setattr("vllm_gaudi_spec.platforms.base.is_active", lambda: True)
    with pytest.raises(check_engine.WrongOptions, match=r"^deep inside$"):
        check_engine.open_engine(cli.make_parser().parse_args(["graph-check", "some/model"]))
    with pytest.raises(ValueError, match=r"^deep inside$") as raised:
        check_engine.open_engine(cli.make_parser().parse_args(["graph-check", "some/model", "--verbose"]))
    assert raised.traceback[-1].name == "refuse"


def test_what_pip_is_named_for_is_required() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(cli.output._REQUIRED) == required


# ---- completion ------------------------------------------------------------------------------------------


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    function = "_shtab_gaudi_spec"
    code = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; {function}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = completion.script(cli.make_parser(), "bash")
    done = subprocess.run(["bash", "-c", f"{script}\n{code}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes(tmp_path: Path) -> None:
    assert completed("gaudi-spec", "") == [*cli._COMMANDS]
    assert completed("gaudi-spec", "do") == ["doctor"]
    assert completed("gaudi-spec", "doctor", "--m") == ["--model", "--method", "--max-model-len", "--max-num-seqs"]
    assert completed("gaudi-spec", "graph-check", "--device", "h") == ["hpu-emulated", "hpu"]
    assert completed("gaudi-spec", "completion", "f") == ["fish"]
    (tmp_path / "run.json").touch()
    assert completed("gaudi-spec", "report", "-o", f"{tmp_path}/r") == [f"{tmp_path}/run.json"]
    assert completed("gaudi-spec", "report", f"{tmp_path}/r") == [f"{tmp_path}/run.json"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for action in completion._actions(cli.make_parser()):
        assert all(name.lstrip("-") in script for name in action.option_strings)
    assert all(command in script for command in cli._COMMANDS)
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=script, text=True, check=True)


def test_commands_have_what_all_commands_have() -> None:
    (actions,) = (a for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in actions.choices.items():
        assert "--json" in parser.format_help() or name in ("chat", "completion")
        assert parser.description


# ---- workload ------------------------------------------------------------------------------------------------


def test_a_seed_gives_one_workload() -> None:
    assert check_engine.mixed(40, 3, WORDS, LIMITS) == check_engine.mixed(40, 3, WORDS, LIMITS)
    assert check_engine.mixed(40, 3, WORDS, LIMITS) != check_engine.mixed(40, 4, WORDS, LIMITS)


@pytest.mark.parametrize("limits", [LIMITS, check_engine.Limits(vocab=50, max_model_len=64, max_num_seqs=1)])
@pytest.mark.parametrize("count", [1, 2, 20, 64])
def test_requests_fit_the_model(count: int, limits: check_engine.Limits) -> None:
    text = [token % limits.vocab for token in WORDS]
    for items in (check_engine.mixed(count, 0, text, limits), check_engine.with_prompt_logprobs(0, text, limits)):
        for item in items:
            assert 1 <= len(item.prompt) <= limits.max_model_len - item.params["max_tokens"]
            assert all(0 <= token < limits.vocab for token in item.prompt)
            assert item.params.get("min_tokens", 0) <= item.params["max_tokens"]
            for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
                assert all(0 <= token < limits.vocab for token in item.params.get(name, ()))


def test_the_workload_is_mixed() -> None:
    items = check_engine.mixed(32, 0, WORDS, LIMITS)
    assert [item.arrives for item in items] == sorted(item.arrives for item in items)
    assert len({item.arrives for item in items}) > 8
    assert any(item.leaves_after is not None for item in items)
    assert any(len(item.prompt) + item.params["max_tokens"] == LIMITS.max_model_len for item in items)
    expected = {name for kind in check_engine.KINDS for name in kind}
    assert {name for item in items for name in item.params} >= expected
    assert not any("prompt_logprobs" in item.params for item in items)
    beginnings = [item.prompt[:150] for item in items if len(item.prompt) > 150]
    assert len(set(beginnings)) < len(beginnings), "nobody shares a beginning"


# ---- counting ------------------------------------------------------------------------------------------------

AMOUNTS = ("host_reads", "dynamic_ops", "fallbacks", "garbage_reads", "upload_bytes", "download_bytes", "kv_bytes_read")


def tally(compiles: int = 0, **amounts: int) -> dict[str, int]:
    return {"compiles": compiles, "lazy_compiles": compiles, **dict.fromkeys(AMOUNTS, 0), **amounts}


def report(
    steps: Sequence[dict[str, int]], events: dict[tuple[str, str, str], int] | None = None, after_steps: int = 0
) -> dict[str, Any]:
    """A worker's report on the emulated card after a warm-up of two graphs; `after_steps`: syncs after the last one."""
    total = {name: sum(step[name] for step in steps) for name in tally()}
    total["host_reads"] += after_steps
    names = ("kind", "what", "where")
    graphs = [
        {"name": "Runner._forward", "replays": len(steps)},
        {"name": "Runner._forward", "replays": 0},
        {"name": "Runner._finish", "replays": len(steps)},
    ]
    emulated = {
        "total": total,
        "num_steps": len(steps),
        "steps": list(steps)[-4:],
        "events": [{**dict(zip(names, key, strict=True)), "count": count} for key, count in (events or {}).items()],
        "graphs": graphs,
        "estimate": {},
    }
    return real_report(len(steps), total["compiles"], emulated=emulated)


def real_report(steps: int, compiles: int, **more: Any) -> dict[str, Any]:
    metrics = {"graph_compilation": {"TotalNumber": 7 + compiles}, "cpu_fallback": {"TotalNumber": 0}}
    device = {**metrics, **({"emulator": more["emulated"]} if more else {})}
    return {
        "graphs": {"warmup": 5, "listed": 6, "after_warmup": 0, "unexpected": []},
        "steps": steps,
        "host_syncs_per_step": 1.0,
        "device": device,
    }


def result_of(meter: counting.Meter) -> dict[str, Any]:
    result: dict[str, Any] = {
        "device": "hpu-emulated",
        "mode": "lazy",
        "dtype": "float32",
        "settings": {
            "model": "m",
            "speculation": "none",
            "seed": 0,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "host_syncs": 1,
        },
        "traffic": {"requests": 3, "aborted": 1, "tokens": 20},
        "graphs": counting.graphs(meter.first, meter.last),
        "phases": {"mixed": counting.phase(meter).as_dict()},
    }
    return {**result, "findings": counting.findings(result)}


def result_after(*looks: dict[str, Any], first: dict[str, Any] | None = None) -> dict[str, Any]:
    meter = counting.Meter(first or report([]))
    for look in looks:
        meter.look(look)
    return result_of(meter)


READ = ("device-to-host sync", "copy to the host", "devices/hpu/backend.py:9 (start_download)")
GOOD = tally(host_reads=1, upload_bytes=100, kv_bytes_read=50)


def test_a_clean_run() -> None:
    result = result_after(report([GOOD] * 3, {READ: 3}), report([GOOD] * 6, {READ: 6}))
    mixed = result["phases"]["mixed"]
    assert (mixed["steps"], mixed["host_syncs"], mixed["max_syncs_in_a_step"], mixed["compiles"]) == (6, 6, 1, 0)
    assert (mixed["upload_bytes"], mixed["kv_bytes_read"]) == (600, 300)
    assert mixed["sync_lines"] == [{"count": 6, "what": READ[1], "where": READ[2]}]
    assert (result["graphs"]["captured"], result["graphs"]["never_used"]) == (3, 1)
    assert result["graphs"]["by_name"]["Runner._forward"] == {"captured": 2, "never_used": 1}
    assert result["findings"] == []
    conclusion = counting.conclusion(result)
    assert conclusion.startswith("clean: ")
    assert conclusion.endswith("no step of the mixed requests has more than 1 device-to-host sync")
    table = [" ".join(line.split()) for line in counting.table(result).splitlines()]
    assert "graphs captured in warm-up 3, of which 1 never used here" in table
    assert "device-to-host syncs per step 1.00, 1 at most" in table
    assert any(line.startswith("estimate of a step, gaudi3 mean 0.") for line in table)
    assert f"6 x {READ[1]} at {READ[2]}" in table


def test_only_what_came_since_counts() -> None:
    """Reads and compiles of warm-up are nobody's fault."""
    warm = report([tally(compiles=9, host_reads=4)], {READ: 4, ("graph capture", "g", "x.py:1 (f)"): 9})
    steps = [tally(compiles=9, host_reads=4), GOOD, GOOD]
    result = result_after(report(steps, {READ: 6, ("graph capture", "g", "x.py:1 (f)"): 9}), first=warm)
    mixed = result["phases"]["mixed"]
    assert (mixed["steps"], mixed["host_syncs"], mixed["compiles"]) == (2, 2, 0)
    assert result["findings"] == []


def test_a_compile_is_found_with_its_line() -> None:
    late = ("compile after warm-up", "sort, op 3 of 4", "my/drafter.py:12 (propose)")
    result = result_after(report([GOOD, tally(compiles=2, host_reads=1)], {READ: 2, late: 2}))
    (finding,) = result["findings"]
    assert finding == "compiled after warm-up, in the mixed phase: 2 graphs: my/drafter.py:12 (propose)"
    assert counting.conclusion(result) == f"not clean: {finding}"
    assert "       2 x sort, op 3 of 4 at my/drafter.py:12 (propose)" in counting.table(result).splitlines()


def test_a_second_sync_is_found_with_its_line() -> None:
    item = ("device-to-host sync", "item", "my/drafter.py:14 (propose)")
    result = result_after(report([GOOD, tally(host_reads=3), GOOD], {READ: 3, item: 2}))
    (finding,) = result["findings"]
    assert "1 of 3 steps have more than 1 device-to-host sync, one of them 3" in finding
    assert "my/drafter.py:14 (propose)" in finding


def test_syncs_after_the_last_step_are_counted() -> None:
    result = result_after(report([GOOD], {READ: 1}, after_steps=2))
    assert result["phases"]["mixed"]["max_syncs_in_a_step"] == 2
    assert len(result["findings"]) == 1


def test_a_signature_outside_the_list_is_found() -> None:
    last = report([GOOD], {READ: 1})
    last["graphs"]["unexpected"] = ["Shape(decode, 9, 1, 2)"]
    assert "Shape(decode, 9, 1, 2)" in result_after(last)["findings"][0]


def test_steps_that_were_not_kept_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="5 steps passed since the last look, of which 4 were kept"):
        result_after(report([GOOD] * 5, {READ: 5}))


def test_what_another_card_captured_is_counted() -> None:
    """By the backend, and without estimates: nothing is published that one could count with."""

    def captured(programs: int, steps: int) -> dict[str, Any]:
        found = report([GOOD] * steps, {READ: steps})
        emulated = {**found["device"]["emulator"], "estimate": None}
        return {**found, "device": {"captured": {"Runner._forward": programs, "_pack": 2}, "emulator": emulated}}

    result = result_after(captured(5, 3), first=captured(5, 0))
    assert result["graphs"]["compiles_until_ready"] == 7
    assert result["phases"]["mixed"]["compiles"] == 0
    assert "estimate" not in counting.table(result)
    late = real_report(3, 0) | {"device": {"captured": {"Runner._forward": 6}}}
    first = real_report(0, 0) | {"device": {"captured": {"Runner._forward": 5}}}
    assert result_after(late, first=first)["findings"] == ["compiled after warm-up, in the mixed phase: 1 graphs"]


def test_a_card_counts_less() -> None:
    result = result_after(real_report(4, 0), first=real_report(0, 0))
    mixed = result["phases"]["mixed"]
    assert (mixed["steps"], mixed["compiles"], mixed["runner_syncs"]) == (4, 0, 4)
    assert mixed["host_syncs"] is mixed["kv_bytes_read"] is result["graphs"]["captured"] is None
    assert result["findings"] == []
    assert "not counted on this device" in counting.table(result)
    assert "the runner makes at most 1 device-to-host sync per step" in counting.conclusion(result)
    found = result_after(real_report(4, 2), first=real_report(0, 0))["findings"]
    assert found == ["compiled after warm-up, in the mixed phase: 2 graphs"]


# ---- verify-gaudi, verify-ascend ------------------------------------------------------------------------------


def both_phases(result: dict[str, Any]) -> dict[str, Any]:
    return result | {"phases": result["phases"] | {"prompt log-probabilities": result["phases"]["mixed"]}}


def card_and_emulated() -> tuple[dict[str, Any], dict[str, Any]]:
    card = result_after(real_report(4, 0), first=real_report(0, 0))
    return both_phases(card), both_phases(result_after(report([GOOD] * 4, {READ: 4})))


def test_comparison_of_card_and_emulation() -> None:
    rows = verify_device.compare(*card_and_emulated())
    conclusions = {row.name: row.conclusion for row in rows}
    assert conclusions["KV bytes read"] == conclusions["device-to-host syncs, all"] == verify_device.NOT_COUNTED
    assert {conclusion for conclusion in conclusions.values() if conclusion != verify_device.NOT_COUNTED} == {"equal"}
    assert verify_device.agrees(rows)


def test_a_difference_that_matters() -> None:
    card, emulated = card_and_emulated()
    card["phases"]["mixed"]["compiles"] = 2
    card["phases"]["mixed"]["steps"] += 1
    rows = {row.name: row for row in verify_device.compare(card, emulated)}
    assert rows["graphs compiled after warm-up"].conclusion == "DIFFERENT"
    assert rows["steps"].conclusion == "different"
    assert not verify_device.agrees(list(rows.values()))


def test_verify_gaudi_runs_in_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's, else that of the card's torch."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    assert verify_device.environment("hpu")["PT_HPU_LAZY_MODE"] == "0"
    monkeypatch.delenv("PT_HPU_LAZY_MODE")
    monkeypatch.setattr(verify_device.devices, "has_card", lambda name: True)
    monkeypatch.setattr(verify_device, "gaudi_has_lazy_mode", lambda: False)
    assert {verify_device.environment(device)["PT_HPU_LAZY_MODE"] for device in ("hpu", "hpu-emulated")} == {"0"}


def checked(title: str, rows: Sequence[verify_device.Row]) -> dict[str, Any]:
    return {
        "title": title,
        "error": None,
        "rows": [{**row.__dict__, "conclusion": row.conclusion} for row in rows],
        "findings": {"card": [], "emulated card": ["2 programs"]},
    }


def test_markdown_for_the_documentation() -> None:
    rows = [
        verify_device.Row("steps", 1200, 1201, must_agree=False),
        verify_device.Row("KV bytes read", None, 5000, must_agree=False),
        verify_device.Row("device-to-host syncs of results per step", 0.9, 0.9, must_agree=True),
    ]
    failed = {"title": "ngram", "error": "graph-check on hpu ended with status 1: no memory"}
    record = {
        "a_card": "a Gaudi",
        "rehearsal": False,
        "machine": {"torch": "2.11", "driver": "1.24"},
        "self_test": {"checks": [{"name": "noise", "status": "failed", "detail": "9 ulp"}]},
        "tests": [{"name": "test_chunks", "result": "passed", "seconds": 12.3}],
        "checks": [checked("draft_model", rows), failed],
        "result": "all agree",
    }
    lines = verify_device.markdown(record).splitlines()
    assert lines[0] == "## Verified on a Gaudi"
    assert "| noise | failed | 9 ulp |" in lines
    assert "| test_chunks | passed | 12 |" in lines
    assert "| steps | 1,200 | 1,201 | different |" in lines
    assert "| KV bytes read |  | 5,000 | not counted on the device |" in lines
    assert "| device-to-host syncs of results per step | 0.9 | 0.9 | equal |" in lines
    assert "graph-check, emulated card: 2 programs" in lines
    assert failed["error"] in lines
    rehearsed = verify_device.markdown(record | {"rehearsal": True})
    assert rehearsed.startswith("## Rehearsal on the emulated card")
    assert "| count | in place of the card | emulated | |" in rehearsed
    assert "graph-check, in place of the card: clean" in rehearsed


@pytest.mark.parametrize("device", verify_device.DEVICES.values(), ids=lambda device: device.name)
def test_without_a_card_it_is_an_error(
    device: verify_device.Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = dataclasses.replace(device, is_available=lambda: False)
    monkeypatch.setitem(verify_device.DEVICES, device.name, without)
    monkeypatch.setattr(sys, "argv", ["verify_device.py", device.name])
    assert verify_device.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: there is no {device.kind} here: verify-{device.name} needs a card")
    assert said.count("\n") == 1
