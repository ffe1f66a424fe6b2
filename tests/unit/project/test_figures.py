"""Figures of the pages: drawings that load nothing, fit a page, and say in words what they show."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
DARK = "@media (prefers-color-scheme: dark)"
DRAWN = {"svg", "title", "desc", "style", "defs", "marker", "rect", "path", "text", "tspan"}
every_figure = pytest.mark.parametrize("figure", sorted(DOCS.glob("figures/*.svg")), ids=lambda path: path.name)


@every_figure
def test_a_drawing_and_nothing_else(figure: Path) -> None:
    root = ElementTree.parse(figure).getroot()
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= DRAWN
    assert all("href" not in name for element in root.iter() for name in element.attrib)
    assert "//" not in figure.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "@import" not in figure.read_text()


@every_figure
def test_a_card_of_its_own_in_light_and_dark(figure: Path) -> None:
    root = ElementTree.parse(figure).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert width <= 900
    first = next(element for element in root if element.tag == f"{SVG}rect")
    assert first.attrib["class"] == "card"
    assert (float(first.attrib["width"]), float(first.attrib["height"])) == (width - 1, height - 1)
    colours = re.findall(r"\.card \{ fill: (#\w+)", figure.read_text())
    assert colours == ["#ffffff", "#161b22"]


@every_figure
def test_every_colour_has_a_dark_one(figure: Path) -> None:
    light, _, dark = re.search(r"<style>(.*)</style>", figure.read_text(), re.S)[1].partition(DARK)  # type: ignore[index]
    coloured, again = (
        {
            name
            for names, rule in re.findall(r"((?:\.\w+,? )+)\{([^}]*)\}", half)
            if "#" in rule
            for name in names.split()
        }
        for half in (light, dark)
    )
    assert {name.strip(",") for name in coloured} == {name.strip(",") for name in again}
    assert not re.search(r'(?:fill|stroke)="#', figure.read_text()), "colours stand in the style alone"


@every_figure
def test_told_in_words(figure: Path) -> None:
    root = ElementTree.parse(figure).getroot()
    assert [len(root.findtext(f"{SVG}{name}", "")) > 10 for name in ("title", "desc")] == [True, True]
    pages = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    alt = re.search(rf"!\[([^\]]+)\]\(figures/{figure.name}\)", pages)
    assert alt is not None, "no page shows it"
    assert len(alt[1]) > 100


def test_there_are_figures() -> None:
    assert len(list(DOCS.glob("figures/*.svg"))) >= 2
