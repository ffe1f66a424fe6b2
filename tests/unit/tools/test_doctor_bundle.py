"""The file that `gaudi-spec doctor --bundle` writes has what a report needs, and no secret."""

import getpass
import json
import socket
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.doctor import bundle, machine, probe

SECRETS = {
    "OPENAI_API_KEY": "plainword",
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "VLLM_API_KEY": "key-with-no-form",
    "AWS_SECRET_ACCESS_KEY": "aws/secret+value",
}
LINES = """\
(APIServer pid=7) args: {'api_key': ['another-key', 'one-more-key'], 'model': '/home/alice/llama', 'max_tokens': 5}
vllm serve MODEL --api-key third-key sixth-key --max-model-len 4096 --tokenizer-mode auto
HTTPS_PROXY=http://bob:fourth@proxy:8080 Authorization: Bearer fifth.key
token hf_zyxwvutsrqponmlk of {home}/cache, on {host}, by {user}
+ vllm serve MODEL --served-name m --api-key seventh-key
['vllm', 'serve', '--api-key', 'eighth-key'] {"password": "ninth horse battery"} https://blob/x?sv=1&sig=tenthsig
INFO hf_config_path and hf_overrides are none
INFO step 12, 64 tokens in 3 ms, the last token was 7
"""


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Set secrets in the environment, and return every text that a bundle must not contain."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    home = tmp_path / "carol"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(getpass, "getuser", lambda: "carolsname")
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-of-carol")
    others = [
        *("another-key", "one-more-key", "alice", "third-key", "sixth-key", "bob", "fourth", "fifth.key"),
        *("seventh-key", "eighth-key", "ninth", "battery", "tenthsig", "zyxwvutsrqponmlk"),
    ]
    return [*SECRETS.values(), *others, str(home), "carolsname", "machine-of-carol"]


def test_bundle_has_everything_but_secrets(
    secrets: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    monkeypatch.setattr(probe, "probe", lambda options: [])
    monkeypatch.setattr(machine, "check_drivers", list)
    monkeypatch.setattr(
        bundle, "run_self_test", lambda: {"status": 0, "result": {"noise": "passed"}, "messages": secrets[0]}
    )
    log, made = tmp_path / "server.log", tmp_path / "report.zip"
    written = LINES
    for name, value in (("{home}", str(Path.home())), ("{host}", "machine-of-carol"), ("{user}", "carolsname")):
        written = written.replace(name, value)
    log.write_text(written)
    assert cli.main(["doctor", "--bundle", str(made), "--log", str(log)]) in (0, 1)
    with zipfile.ZipFile(made) as file:
        texts = {name: file.read(name).decode() for name in file.namelist()}
    parts = ["doctor.json", "configuration.json", "environment.json", "versions.json", "selftest.json", "server.log"]
    assert [*texts] == parts
    for name, text in texts.items():
        assert not [secret for secret in secrets if secret in text], name
    read: dict[str, Any] = {name: json.loads(text) for name, text in texts.items() if name.endswith(".json")}
    assert read["environment.json"]["PT_HPU_LAZY_MODE"] == "0"
    assert "torch" in read["versions.json"]
    assert read["selftest.json"]["result"] == {"noise": "passed"}
    assert read["doctor.json"]["conclusion"]
    for kept in (
        "'max_tokens': 5",
        "--max-model-len 4096 --tokenizer-mode auto",
        "hf_config_path and hf_overrides are none\nINFO step 12, 64 tokens in 3 ms, the last token was 7",
    ):
        assert kept in texts["server.log"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--log", "server.log"], "--log is part of the bundle; add --bundle FILE"),
        (["--bundle", "b.zip", "--log", "no-such.log"], "--log no-such.log is not a file"),
        (["--bundle", "no/such/folder/b.zip"], "there is no folder"),
        (["--bundle", "-"], "--bundle writes a zip file and needs its name"),
    ],
)
def test_bundle_that_cannot_be_written_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *options]) == 2
    assert words in capsys.readouterr().err
