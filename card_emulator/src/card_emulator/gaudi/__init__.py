"""The parts of the emulator that apply only to a Gaudi: lazy mode, HPU graphs, Habana's package and fused
operations."""
