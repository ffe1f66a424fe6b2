"""One way of spelling for all commands: names, dashes, defaults, suggestions."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.cli import demo
from vllm_gaudi_spec.tools.io.command_line import SHARED, json_object, positive, with_dashes

COMMANDS = {
    name: parser
    for action in cli.make_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
    for name, parser in action.choices.items()
}
# What several commands take, and its one name.
NAMES = {
    "num_spec_tokens": "--num-speculative-tokens",
    "num_speculative_tokens": "--num-speculative-tokens",
    "draft": "--draft",
    "draft_model": "--draft",
    "speculative_config": "--speculative-config",
}


def options() -> Iterator[tuple[str, argparse.Action]]:
    return ((name, action) for name, parser in COMMANDS.items() for action in parser._actions)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_have_dashes_and_one_name(name: str) -> None:
    for action in COMMANDS[name]._actions:
        assert not any("_" in option for option in action.option_strings), action.option_strings
        if action.dest in NAMES and action.option_strings:
            assert action.option_strings[0] == NAMES[action.dest]
        name_of_action = next(iter(action.option_strings), None)
        if name_of_action in SHARED:
            assert action.option_strings[1:] == list(SHARED[name_of_action]), "the same in every command"


def test_the_names_are_used_by_several_commands() -> None:
    for option in set(NAMES.values()):
        assert len({name for name, action in options() if option in action.option_strings}) > 1, option


ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path for folder in ("calibration", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
ADDING = ("add", "add_argument", "add_shared")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_read_their_options_as_the_commands_do(script: Path) -> None:
    text = script.read_text()
    assert "ArgumentParser(" not in text
    if "parse_args(" in text:
        assert re.search(r"\b(Parser|parser_of)\(", text)
    for name, others in SHARED.items():
        assert f'add("{name}"' not in text, "add_shared adds it"
        assert f'add_argument("{name}"' not in text, "add_shared adds it"
        assert not any(f'"{other}"' in text for other in others)


def added(source: str) -> Iterator[tuple[list[str], set[str]]]:
    """The options that a script adds: their names, and what else is stated."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in ADDING:
            words = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if names := [word for word in words if word.startswith("-")]:
                yield names, {keyword.arg or "" for keyword in call.keywords}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_explain_each_option(script: Path) -> None:
    for names, stated in added(script.read_text()):
        assert "help" in stated, names
        assert not any("_" in name for name in names), names


def test_options_of_scripts_are_found() -> None:
    assert [names for names, _ in added("parser.add_argument('--a_b')\nadd_shared(add, '--c', help='d')")] == [
        ["--a_b"],
        ["--c"],
    ]
    assert any(True for script in SCRIPTS for _ in added(script.read_text()))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_explain_each_option(name: str) -> None:
    for action in COMMANDS[name]._actions:
        assert action.help, action.dest


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_each_default(name: str) -> None:
    parser = COMMANDS[name]
    formatter = parser._get_formatter()
    for action in parser._actions:
        takes_value = action.nargs != 0 and (action.option_strings or action.nargs is not None)
        if takes_value and not action.required:
            assert "default" in str(formatter._get_help_string(action)), action.dest
    parser.format_help()  # percent signs


def test_help_of_the_demo_names_its_own_number_of_prompts() -> None:
    options = cli.make_parser().parse_args(["demo"])
    words = demo.command(options, ["demo"])
    real = words[words.index("--num-prompts") + 1]
    (action,) = (one for one in COMMANDS["demo"]._actions if one.dest == "num_prompts")
    assert action.help is not None
    assert action.help.endswith(f"(default: {real})")


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("--max_model_len", "--max-model-len"),
        ("--additional_config={'a_b': 1}", "--additional-config={'a_b': 1}"),
        ("--json", "--json"),
        ("my_model", "my_model"),
        ("-x_y", "-x_y"),
    ],
)
def test_underscores(word: str, spelled: str) -> None:
    assert with_dashes(word) == spelled


def test_both_spellings_mean_the_same() -> None:
    parser = cli.make_parser()
    dashes = parser.parse_args(["doctor", "--model", "m", "--max-model-len", "9", "--num-speculative-tokens=2"])
    assert vars(dashes) == vars(
        parser.parse_args(["doctor", "--model", "m", "--max_model_len", "9", "--num_speculative_tokens=2"])
    )
    # vllm-gaudi's script has these names.
    found = parser.parse_args(["demo", "--num_spec_tokens", "2", "--osl", "7", "--draft_model", "d"])
    assert (found.num_spec_tokens, found.osl, found.draft_model) == (2, 7, "d")


def test_a_command_has_a_suggestion_and_no_command_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["self-test"])
    assert capsys.readouterr().err.endswith("'completion'); did you mean selftest?\n")
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 2
    assert "check this machine, and a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (["doctor", "--modle", "m"], "unrecognized arguments: --modle m; did you mean --model?"),
        (["doctor", "--num-speculative-token-s=3"], "did you mean --num-speculative-tokens?"),
        (["doctor", "--zzz"], "unrecognized arguments: --zzz"),
        (["demo", "--batchsize", "2"], "did you mean --batch-size?"),
        (["demo", "--task", "ngarm"], "'compare'); did you mean ngram?"),
    ],
)
def test_suggestions(words: list[str], ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gaudi-spec {words[0]}: error: ")  # of the command, not of the program
    assert line.endswith(ending)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_positive_refuses_other_texts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of 1 or more"):
        positive(text)


def test_json_object_refuses_other_json() -> None:
    assert positive("12") == 12
    assert json_object('{"dtype": "float32"}') == {"dtype": "float32"}
    for text in ("[1]", "3", "{"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not (a JSON object|JSON)"):
            json_object(text)
