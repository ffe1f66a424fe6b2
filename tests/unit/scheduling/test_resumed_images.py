"""A request that comes back after a preemption still has its images, though the prefix cache had them before."""

from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

from tests.support.schedulers import answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.scheduling.scheduler import SpecScheduler

BLOCK = 16
DATA: Any = {}


def request(name: str) -> Request:
    init_none_hash(sha256)
    image = MultiModalFeatureSpec(data=DATA, modality="image", identifier="i", mm_position=PlaceholderRange(2, 8))
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, [*range(40)], SamplingParams(max_tokens=1), None, mm_features=[image], block_hasher=hasher)


def test_cached_image_is_sent_to_the_worker(tmp_path: Path) -> None:
    """With vLLM's older contract, by which a request is sent once."""
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
