"""Without a Chromium, tests are skipped with the remedy, and fail in continuous integration."""

from __future__ import annotations

import pytest

from tests.support import chromium


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_a_browser(ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setitem(chromium._BROWSER, "find", lambda: None)
    with pytest.raises(outcome, match="make browser"), chromium.browser():
        pass
