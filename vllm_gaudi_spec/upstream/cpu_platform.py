"""vLLM's own CPU platform, from which ours derives.

Imported while vLLM itself is half imported. Breaks when upstream changes the hooks that `platforms/cpu.py` overrides.
"""

from vllm.platforms.cpu import CpuPlatform as CpuPlatform
from vllm.utils.cpu_resource_utils import get_visible_memory_node as get_visible_memory_node
