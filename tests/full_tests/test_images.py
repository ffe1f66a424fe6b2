"""Images, video and sound in prompts: answers are those of transformers, with drafts as without, and a bad image is a
bad request.

`make verify-models` has the other models and cases, beside upstream's platform.
"""

import base64
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.full_tests.server import Server
from tests.full_tests.test_bad_input import chat, check_alive, check_error
from tests.models import vision
from tests.models.media import SMALL, picture
from tests.models.run import check
from tests.support.marks import slow


@pytest.mark.parametrize(
    ("device", "cases"),
    [
        # Positions of Qwen's have three rows. Borders of chunks lie within its images.
        ("cpu", ("qwen2.5-vl-images@chunks",)),
        *slow(
            # Images of one size, in tiles, and in patches.
            ("hpu-emulated", ("llava-images", "internvl-images", "qwen2-vl-images", "qwen2.5-vl-images@chunks")),
            ("hpu-emulated-compiled", ("qwen2-vl-images",)),
        ),
    ],
    ids=["cpu", "gaudi", "gaudi compiled"],
)
def test_media_answers_equal_transformers(device: str, cases: tuple[str, ...], tmp_path: Path) -> None:
    check(device, tmp_path, *cases)


@pytest.fixture(scope="module")
def asked(made: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--max-model-len", "256", "--max-num-batched-tokens", "32"]
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(vision.FOLDER)]))
    log = tmp_path_factory.mktemp("images") / "log"
    with Server(made("qwen2.5-vl-images"), log, *options, *drafts, environment={"PYTHONPATH": path}) as server:
        yield server


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def png(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "png")
    return written.getvalue()


def question(*images: bytes, **more: Any) -> dict[str, Any]:
    parts = [dict(type="image_url", image_url=dict(url=url(image))) for image in images]
    text = dict(type="text", text="What do you see on these pictures, from the left to the right?")
    return chat([*parts, text], max_tokens=12, temperature=0, ignore_eos=True, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "words"),
    [
        pytest.param(b"", ["image"], id="no bytes"),
        pytest.param(b"GIF89a, or so it says", ["image"], id="no image"),
        pytest.param(png(picture(SMALL))[:-40], ["image"], id="half of one"),
        pytest.param(png(Image.new("L", (20_000, 1))), ["Failed to apply", "size=20000x1"], id="20,000 x 1"),
        pytest.param(png(Image.new("1", (20_000, 20_000))), ["pixels"], id="a decompression bomb"),
    ],
)
def test_bad_image_is_a_bad_request(image: bytes, words: list[str], asked: Server) -> None:
    check_error(asked.client.post("/v1/chat/completions", json=dict(model="tiny") | question(image)), words)
    check_alive(asked)
