"""The page in a real browser: it renders, complains of nothing, loads nothing, fits a phone, and can be read."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support import chromium as started
from tests.support.chromium import browser
from tests.support.processes import ROOT
from tests.support.records import answer, run, task
from vllm_gaudi_spec.tools.report import page

PHONE = 360
# Of each text, the contrast with its background, as WCAG counts it; the worst ones.
CONTRAST = """(() => {
  const parts = (text) => { const c = text.match(/[\\d.]+/g).map(Number); return c.length > 3 ? c : [...c, 1]; };
  const light = (c) => { c = c / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const background = (e) => { for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor); if (c[3] > 0) return c; } return [255, 255, 255, 1]; };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim()) continue;
    const [a, b] = [luminance(parts(getComputedStyle(e).color)), luminance(background(e))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), walk.currentNode.data.trim().slice(0, 30)]);
  }
  return found.sort((left, right) => left[0] - right[0]).slice(0, 3);
})()"""
HEADLESS_TABLES = "[...document.querySelectorAll('table')].filter((t) => !t.querySelector('th[scope=col]')).length"
LOOKS = "getComputedStyle(document.body).backgroundColor"


def long_record(device: str = "cpu", concurrency: int = 1) -> dict[str, object]:
    """Names without a place to break them, many positions, and an answer that tries to run something."""
    said = answer(
        "<script>document.title = 'broken'</script> " + "x" * 300, ("a", 0), ("b c d <img/src=x>", 3), ("y" * 400, 0)
    )
    many = task(
        "universal_draft",
        1234.5,
        k=16,
        answers=[said],
        acc_counts=list(range(16, 0, -1)),
        accepted_lengths=list(range(17)),
        draft_model="/models/" + "a-very-long-name-of-a-drafter-" * 4,
    )
    base = task("baseline", 1000.0, k=0, answers=[said])
    model = "/models/" + "target-" * 20
    made = run(base, task("ngram", 900.0, answers=[said]), many, device=device, model=model)
    made["settings"]["batch_size"] = concurrency
    return made


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_a_browser(ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, the message has the remedy; continuous integration has one."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setitem(started._BROWSER, "find", lambda: None)
    with pytest.raises(outcome, match="make browser"), browser():
        pass


@pytest.mark.parametrize("runs", [1, 2])
def test_the_page_in_chromium(runs: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    files = [page.Run(f"run{place}.json", long_record(concurrency=1 + place)) for place in range(runs)]
    page.write(files, path)
    backgrounds = set()
    with browser() as chromium:
        for width in (1100, PHONE):
            for dark in (False, True):
                chromium.open(path, width=width, dark=dark)
                chromium.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
                assert chromium.complaints() == []
                assert chromium.requests() == [path.resolve().as_uri()]
                assert chromium.evaluate("document.title") != "broken"
                assert chromium.evaluate("window.innerWidth") == width
                widest = chromium.evaluate("document.scrollingElement.scrollWidth")
                assert widest <= width, f"{widest} wide on a screen of {width}"
                assert chromium.evaluate("document.querySelectorAll('mark').length") > runs
                assert chromium.evaluate("document.querySelectorAll('svg rect.fill').length") >= 40 * runs
                assert chromium.evaluate("document.querySelectorAll('svg.drawn polyline').length") == 2 * (runs - 1)
                assert chromium.evaluate(HEADLESS_TABLES) == 0
                assert chromium.evaluate("getComputedStyle(document.querySelector('mark')).borderBottomWidth") == "2px"
                worst = chromium.evaluate(CONTRAST)
                assert worst[0][0] >= 4.5, worst
                backgrounds.add(chromium.evaluate(LOOKS))
                chromium.picture(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
    assert len(backgrounds) == 2, "dark and light look the same"


def test_a_package_without_a_browser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ubuntu's is only a door to snap."""
    main = runpy.run_path(str(ROOT / "requirements" / "browser.py"))["main"]
    for name, value in {"find": lambda: None, "install": lambda: None}.items():
        monkeypatch.setitem(main.__globals__, name, value)
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "its package brought no Chromium: install the package chromium" in said.err
