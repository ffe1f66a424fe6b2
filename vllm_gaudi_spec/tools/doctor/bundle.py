"""`gaudi-spec doctor --bundle`: a single file to attach to a bug report, with secrets masked.

The following are masked everywhere in the bundle: values of variables whose names suggest a secret, tokens recognized
by their format, credentials in URLs, user and machine names, and home folders.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import re
import socket
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import environment

_SECONDS = 600
_MOST_OF_A_LOG = 8 << 20
_MASK = "***"
# Shorter strings are likely to occur inside other words.
_SHORTEST = 4
_SHORTEST_NAME = 2
# Default account names in images. They do not identify anybody, and masking "vllm" would make most lines unreadable.
_COMMON_NAMES = frozenset(("root", "user", "ubuntu", "vllm", "habana", "localhost"))
# Words in the names of variables and options whose values are confidential.
_WORDS = "|".join(
    (
        "(?:api|access|private)[_-]?key",
        "token(?!izer|s|_id|_budget)",
        "secret",
        "passw(?:or)?d",
        "credential",
    )
)
_RELATED = ("VGS_", "VLLM_", "PT_", "HABANA_", "HCCL_", "ENABLE_", "RUNTIME_", "FUSER_", "ASCEND_", "TORCH", "OMP_")
_NAMED = rf"(?:{_WORDS})[\w-]*['\"]?\s*[=:]\s*"
_FORMS = [
    (re.compile(form), replacement)
    for form, replacement in (
        (r"\bhf_[A-Za-z0-9]{14,}", _MASK),
        (r"\b(?:sk|ghp|github_pat|glpat|xox[bp])[_-](?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{16,}", _MASK),
        (r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]+", rf"\1\2{_MASK}"),
        (r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*", _MASK),
        (r"(\w://)[^/\s@'\"]+@", rf"\1{_MASK}@"),
        (r"(?i)([?&](?:sig|signature|x-amz-signature)=)[^&\s'\"]+", rf"\1{_MASK}"),
        # '--api-key', 'VALUE' and --api-key VALUE VALUE, then "HF_TOKEN": "A VALUE", api_key=['VALUE'], HF_TOKEN=VALUE
        (rf"(?i)(--[\w-]*(?:{_WORDS})[\w-]*['\"]\s*,\s*['\"])[^'\"]+", rf"\1{_MASK}"),
        (rf"(?i)(--[\w-]*(?:{_WORDS})[\w-]*)(?:[^\S\n]+[^\s-]\S*)+", rf"\1 {_MASK}"),
        (rf"(?i)({_NAMED})(['\"])(?:(?!\2)[^\n])+\2", rf"\1\2{_MASK}\2"),
        (rf"(?i)({_NAMED})(?:\[[^\]]*\]|\([^)]*\))", rf"\1{_MASK}"),
        (
            rf"(?i)((?:{_WORDS})[\w-]*['\"]?\s*[=:]\s*['\"]?)(?!(?:None|null|\*\*\*)(?![\w-]))[^\s'\",;\])}}]+",
            rf"\1{_MASK}",
        ),
        (r"/(home|Users)/[^/\s'\":,]+", rf"/\1/{_MASK}"),
    )
]


def write_bundle(found: dict[str, Any], options: dict[str, Any] | None, log: str | None) -> bytes:
    """Return a zip file with the doctor's report, all versions, the configuration, the self-test's result, and a log.

    Args:
        found: The doctor's findings.
        options: The engine's options, if a model was checked.
        log: The log of a server, of which only the end is included.
    """
    mask = Mask()
    contents = {
        "doctor.json": found,
        "configuration.json": options,
        "environment.json": _list_related_variables(),
        "versions.json": dict(sorted((str(one.metadata["Name"]), str(one.version)) for one in distributions())),
        "selftest.json": run_self_test(),
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in contents.items():
            file.writestr(name, json.dumps(mask.apply(value), indent=2) + "\n")
        if log is not None:
            file.writestr("server.log", mask.text(_read_end(Path(log))))
    return made.getvalue()


def run_self_test() -> dict[str, Any]:
    """Run `gaudi-spec selftest`, which opens the card, and return its exit status, result, and messages."""
    command = [sys.executable, "-P", "-m", "vllm_gaudi_spec.tools.cli", "selftest", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        return {"status": None, "messages": f"{said}\nThe self-test did not end within {_SECONDS} s."}
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = done.stdout
    return {"status": done.returncode, "result": result, "messages": done.stderr}


def _list_related_variables() -> dict[str, str]:
    """Return the variables that are set among those in the table and those of vLLM and the vendors."""
    names = {variable.name for variable in environment.VARIABLES}
    found = environment.list_all_variables()
    return {name: found[name] for name in sorted(found) if name in names or name.startswith(_RELATED)}


def _is_secret(name: str) -> bool:
    return re.search(_WORDS, name, re.IGNORECASE) is not None


def _read_end(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        start = max(size - _MOST_OF_A_LOG, 0)
        file.seek(start)
        if start:
            file.readline()  # a line whose beginning is missing may be a secret without its name
        return file.read().decode(errors="replace")


class Mask:
    """A filter that masks secrets in this process's environment and all text that looks like a secret."""

    def __init__(self) -> None:
        host = socket.gethostname()
        home, names = str(Path.home()), {host, host.partition(".")[0]}
        with contextlib.suppress(KeyError, OSError):  # a user ID without an account
            names.add(getpass.getuser())
        # Longer secrets come first, because a secret may be part of another.
        self._secrets = sorted(
            (
                value
                for name, value in environment.list_all_variables().items()
                if _is_secret(name) and len(value) >= _SHORTEST
            ),
            key=len,
            reverse=True,
        )
        words = [name for name in names - _COMMON_NAMES if len(name) >= _SHORTEST_NAME]
        self._names = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words)) if words else None
        self._home = home if home.count("/") > 1 else None

    def text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        if self._home is not None:
            text = text.replace(self._home, "~")
        for form, replacement in _FORMS:
            text = form.sub(replacement, text)
        return text if self._names is None else self._names.sub(_MASK, text)

    def apply(self, value: Any) -> Any:
        """Return a JSON value with secrets masked in all of its strings."""
        if isinstance(value, dict):
            return {
                self.text(str(key)): _MASK if _is_secret(str(key)) and item else self.apply(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.apply(item) for item in value]
        return self.text(value) if isinstance(value, str) else value
