"""Chunks never split images whose tokens see each other in both directions; resumed requests keep their images."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tests.support.schedulers import answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.scheduling.scheduler import SpecScheduler, limit_to_whole_images

IMAGES: Any = [SimpleNamespace(mm_position=PlaceholderRange(offset=offset, length=5)) for offset in (4, 9)]
"""Of positions 4 to 8 and 9 to 13."""


@pytest.mark.parametrize(
    ("num_computed", "num_new", "expected"),
    [
        (0, 4, 4),  # text
        (0, 6, 4),  # up to the first
        (0, 9, 9),  # the whole of it
        (0, 12, 9),
        (0, 20, 20),
        (4, 3, 0),  # it would begin with a part
        (4, 5, 5),
        (6, 2, 0),  # the rest of one, of which the prefix cache had the beginning
        (6, 3, 3),
        (14, 3, 3),  # after both
    ],
)
def test_chunk_never_splits_an_image(num_computed: int, num_new: int, expected: int) -> None:
    assert limit_to_whole_images(IMAGES, num_computed, num_new) == expected


def test_vllm_still_asks_for_chunk_length() -> None:
    parameters = list(inspect.signature(Scheduler._try_schedule_encoder_inputs).parameters)
    assert parameters[:4] == ["self", "request", "num_computed_tokens", "num_new_tokens"]
    assert SpecScheduler._try_schedule_encoder_inputs is not Scheduler._try_schedule_encoder_inputs
    assert inspect.getsource(Scheduler.schedule).count("self._try_schedule_encoder_inputs(") == 2


def test_only_prefix_lm_models_wait_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Scheduler, "_try_schedule_encoder_inputs", lambda _, __, ___, num_new: asked.append(num_new))
    model = SimpleNamespace(is_mm_prefix_lm=False)
    scheduler: Any = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
    scheduler = type("_", (SpecScheduler,), {"__init__": lambda self: vars(self).update(vars(scheduler))})()
    request: Any = SimpleNamespace(mm_features=IMAGES)
    for model.is_mm_prefix_lm in (False, True):
        scheduler._try_schedule_encoder_inputs(request, 0, 6)
    assert asked == [6, 4]


BLOCK = 16
DATA: Any = {}


def request(name: str) -> Request:
    init_none_hash(sha256)
    image = MultiModalFeatureSpec(data=DATA, modality="image", identifier="i", mm_position=PlaceholderRange(2, 8))
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, [*range(40)], SamplingParams(max_tokens=1), None, mm_features=[image], block_hasher=hasher)


def test_cached_image_is_sent_to_the_worker(tmp_path: Path) -> None:
    """vLLM's older contract sends a request once."""
    upstream.apply()
    scheduler: Any = scheduler_of(SpecScheduler, tmp_path)
    scheduler.use_v2_model_runner = False
    scheduler.encoder_cache_manager, scheduler.max_num_encoder_input_tokens = EncoderCacheManager(64), 64
    for name in ("first", "again"):
        scheduler.add_request(request(name))
        scheduled = scheduler.schedule()
        scheduler.update_from_output(scheduled, answer({name: [1]}, {}))
    (new,) = scheduled.scheduled_new_reqs
    assert new.num_computed_tokens == 2 * BLOCK
    assert new.mm_features[0].data is DATA


def test_vllm_leaves_it_out() -> None:
    asked = request("asked")
    asked.num_computed_tokens = 2 * BLOCK
    assert NewRequestData.from_request(asked, ([],)).mm_features[0].data is None
