"""What is Gaudi's own: lazy mode, HPU graphs, Habana's package and fused operations."""
