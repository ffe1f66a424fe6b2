"""Code that applies only to a Gaudi: lazy mode, HPU graphs, Habana's package and fused operations."""
