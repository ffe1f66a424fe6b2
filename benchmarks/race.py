"""Record one answer without drafts and with, and draw both as columns that fill as they were recorded.

python benchmarks/race.py --url http://127.0.0.1:8000

Needs a server that drafts (`gaudi-spec chat` talks to the same). Requests without drafts and with take turns; of each
kind the one of median duration is drawn, in its own time. Writes one SVG file without a script.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared
from vllm_gaudi_spec.tools.live.answers import DRAFT, UNKNOWN, Answer, Piece, counted
from vllm_gaudi_spec.tools.live.http import DEFAULT_URL, Server, ServerError

OUT = Path(__file__).resolve().parents[1] / "docs" / "figures" / "race.svg"
PROMPT = "Write a short story about a dog who finds a key in the garden."
COLUMN, LEFT, TOP, LINE, CHARACTERS = 430, 22, 92, 21, 46
PAUSE_S = 4.0
"""At the end, before it begins again."""


class Step(NamedTuple):
    """One event of a stream."""

    seconds: float
    """Since the request was sent."""
    pieces: list[Piece]


class Recorded(NamedTuple):
    steps: list[Step]
    num_tokens: int
    num_drafts: int

    @property
    def seconds(self) -> float:
        return self.steps[-1].seconds

    @property
    def text(self) -> str:
        return "".join(piece.text for step in self.steps for piece in step.pieces)


def record(server: Server, body: dict[str, Any], k: int) -> Recorded:
    answer, steps, started = Answer(k), [], time.perf_counter()
    for event in server.stream("/v1/chat/completions", body):
        if pieces := list(answer.pieces([event])):
            steps.append(Step(time.perf_counter() - started, pieces))
    return Recorded(steps, answer.num_tokens, answer.num_drafts)


def median(found: list[Recorded]) -> Recorded:
    middle = statistics.median_low(one.seconds for one in found)
    return next(one for one in found if one.seconds == middle)


def race(server: Server, options: argparse.Namespace) -> tuple[Recorded, Recorded]:
    """Without drafts, and with: the medians."""
    k = counted(server).k
    if not k:
        raise ServerError(f"{server.base} does not draft; start it with --speculative-config")
    body = {
        "model": server.model(),
        "messages": [{"role": "user", "content": options.prompt}],
        "max_tokens": options.output_len,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }
    plainly = body | {"vllm_xargs": {"num_speculative_tokens": 0}}
    turns: list[tuple[Recorded, Recorded]] = []
    for turn in range(options.turns + 1):
        # A salt keeps each request from the prefix that another one left, of which less can be used with drafts.
        turns.append(
            (
                record(server, plainly | {"cache_salt": f"plain {turn}"}, 0),
                record(server, body | {"cache_salt": f"drafts {turn}"}, k),
            )
        )
    found = tuple(median(list(kind)) for kind in zip(*turns[1:], strict=True))  # the first one warms up
    plain, drafted = found
    if plain.text != drafted.text:
        raise ServerError(
            "the texts with drafts and without differ, which a tie of two tokens can do: another --prompt"
        )
    if any(piece.kind == UNKNOWN for step in drafted.steps for piece in step.pieces):
        raise ServerError("several steps came at once, so that their drafts are not known; try again")
    return plain, drafted


# ---- drawing -----------------------------------------------------------------------------------------


class Character(NamedTuple):
    text: str
    step: int
    is_draft: bool


def lines(steps: list[Step]) -> list[list[Character]]:
    """Wrapped at spaces, as a terminal of CHARACTERS columns would."""
    all_of_them = [
        Character(one, index, piece.kind == DRAFT)
        for index, step in enumerate(steps)
        for piece in step.pieces
        for one in piece.text
    ]
    found: list[list[Character]] = [[]]
    for character in all_of_them:
        if character.text == "\n":
            found.append([])
            continue
        found[-1].append(character)
        if len(found[-1]) > CHARACTERS:
            start = next((i + 1 for i in range(CHARACTERS, 0, -1) if found[-1][i].text == " "), CHARACTERS)
            found.append(found[-1][start:])
            del found[-2][start:]
    return found


def column(name: str, title: str, recorded: Recorded, left: int) -> list[str]:
    """`name`: of its animations, one for each step."""
    svg = [f'<text class="h" x="{left}" y="40">{escape(title)}</text>']
    for number, line in enumerate(lines(recorded.steps)):
        spans = [
            f'<tspan class="{"d " if draft else ""}{name}{step}">{escape("".join(c.text for c in run))}</tspan>'
            for (step, draft), run in groupby(line, lambda c: (c.step, c.is_draft and c.text != " "))
        ]
        svg.append(f'<text class="c" x="{left}" y="{TOP + number * LINE}" xml:space="preserve">{"".join(spans)}</text>')
    rate = recorded.num_tokens / recorded.seconds
    # Not the number of events: a busy machine puts several steps into one.
    num_steps = recorded.num_tokens - recorded.num_drafts
    done = f"{recorded.num_tokens} tokens in {recorded.seconds:.1f} s: {rate:.0f} tokens/s, {num_steps} steps"
    svg.append(
        f'<text class="s" x="{left}" y="64"><tspan class="{name}{len(recorded.steps) - 1}">{done}</tspan></text>'
    )
    return svg


def animations(name: str, recorded: Recorded, whole: float) -> list[str]:
    """Each step's tokens are unseen until their time."""
    found = []
    for index, step in enumerate(recorded.steps):
        frames = f"0% {{ fill-opacity: 0 }} {100 * step.seconds / whole:.2f}% {{ fill-opacity: 1 }}"
        found.append(f".{name}{index} {{ animation-name: {name}{index} }} @keyframes {name}{index} {{ {frames} }}")
    return found


def draw(plain: Recorded, drafted: Recorded, about: str) -> str:
    whole = max(plain.seconds, drafted.seconds) + PAUSE_S
    height = TOP + LINE * max(len(lines(plain.steps)), len(lines(drafted.steps))) + 34
    description = (
        f"The same answer twice, as recorded: {plain.num_tokens} tokens in {plain.seconds:.1f} s without drafts, in "
        f"{drafted.seconds:.1f} s with drafts, of which {drafted.num_drafts} were accepted: underlined, green. {about}"
    )
    mono = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
    sans = 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
    style = [
        ".card { fill: #ffffff; stroke: #c9d1d9 }",
        f".h, .s {{ font-family: {sans}; fill: #1f2328 }}",
        ".h { font-size: 18px; font-weight: 600 }",
        ".s { font-size: 14px; fill: #4a525c }",
        f".c {{ font-family: {mono}; font-size: 14px; white-space: pre; fill: #1f2328 }}",
        ".d { fill: #1a7f37; font-weight: 600; text-decoration: underline }",
        ".rule { stroke: #d5dae0 }",
        f"tspan {{ animation: {whole:.2f}s step-end infinite }}",
        *animations("p", plain, whole),
        *animations("q", drafted, whole),
        "@media (prefers-reduced-motion: reduce) { tspan { animation: none } }",
        "@media (prefers-color-scheme: dark) {",
        "  .card { fill: #161b22; stroke: #3d444d }",
        "  .h, .c { fill: #e6edf3 }",
        "  .s { fill: #b6c0ca }",
        "  .d { fill: #57c06f }",
        "  .rule { stroke: #3d444d }",
        "}",
    ]
    width = 2 * COLUMN
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
            '  <title id="title">An answer without drafts and with</title>',
            f'  <desc id="desc">{escape(description)}</desc>',
            "  <style>",
            *(f"    {rule}" for rule in style),
            "  </style>",
            f'  <rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            f'  <path class="rule" d="M{COLUMN} 20 V{height - 34}"/>',
            *(f"  {line}" for line in column("p", "without drafts", plain, LEFT)),
            *(f"  {line}" for line in column("q", "with drafts; underlined: accepted", drafted, COLUMN + LEFT)),
            f'  <text class="s" x="{LEFT}" y="{height - 14}">{escape(about)}</text>',
            "</svg>",
            "",
        ]
    )


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server")
    parser.add_argument("--prompt", default=PROMPT, help="the question")
    add_shared(parser.add_argument, "--output-len", type=int, default=96, metavar="N", help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="answers of each kind")
    parser.add_argument("--about", help="the line below both columns (default: the processor and the date)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="the picture")
    options = parser.parse_args()
    about = options.about or f"Real time. Recorded on {platform.machine()}, {date.today().isoformat()}."
    try:
        plain, drafted = race(Server(options.url), options)
    except (ServerError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.write_text(draw(plain, drafted, about))
    print(f"{plain.seconds:.2f} s without drafts, {drafted.seconds:.2f} s with: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
