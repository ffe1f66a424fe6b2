"""The parts that only a Gaudi has: lazy mode, HPU graphs, Habana's package and fused operations."""
