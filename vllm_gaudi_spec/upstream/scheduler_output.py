"""What the scheduler sends to workers with each step.

Breaks when a field is renamed: the runner reads these records, and `SpecSchedulerOutput` extends one of them.
"""

from vllm.v1.core.sched.output import CachedRequestData as CachedRequestData
from vllm.v1.core.sched.output import GrammarOutput as GrammarOutput
from vllm.v1.core.sched.output import NewRequestData as NewRequestData
from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
