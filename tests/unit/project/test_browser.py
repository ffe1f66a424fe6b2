"""Without a Chromium, tests are skipped with the remedy, and fail in continuous integration."""

from __future__ import annotations

import runpy

import pytest

from tests.support import chromium
from tests.support.processes import ROOT


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_a_browser(ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setitem(chromium._BROWSER, "find", lambda: None)
    with pytest.raises(outcome, match="make browser"), chromium.browser():
        pass


def test_a_package_without_a_browser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ubuntu's package only leads to snap."""
    main = runpy.run_path(str(ROOT / "requirements" / "browser.py"))["main"]
    for name in ("find", "install"):
        monkeypatch.setitem(main.__globals__, name, lambda: None)
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert main() == 1
    assert "install the package chromium" in capsys.readouterr().err
