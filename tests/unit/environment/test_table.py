"""The table of environment variables is complete."""

import re

from tests.support.processes import ROOT
from vllm_gaudi_spec.environment import VARIABLES


def test_the_table_has_every_variable_that_is_read() -> None:
    """Ours and those of the Gaudi bridge, by name; two of ours are notes to child processes."""
    source = (ROOT / "vllm_gaudi_spec" / "environment" / "__init__.py").read_text()
    read = set(re.findall(r'"((?:VGS|PT_HPU|VLLM_CPU)_[A-Z_]+|QUANT_CONFIG|VLLM_GRAPH_RESERVED_MEM)"', source))
    assert read - {variable.name for variable in VARIABLES} == {"VGS_START_METHOD_CHOSEN_BY", "VGS_START_FAILURE"}
