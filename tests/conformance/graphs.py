"""What tests of graphs ask a backend."""

from vllm_gaudi_spec.devices.base import DeviceBackend


def compiled(backend: DeviceBackend) -> int:
    """Graphs that the device has made so far; none where it counts none."""
    counts = backend.graphs.counts()
    assert backend.traits.captures == ("compiled_after_warmup" in counts)
    return int(counts.get("compiled_in_warmup", 0)) + int(counts.get("compiled_after_warmup", 0))
