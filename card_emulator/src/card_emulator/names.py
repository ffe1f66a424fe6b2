"""The names of the emulated cards."""

GAUDI2, GAUDI3 = "gaudi2", "gaudi3"
ASCEND910B = "ascend910b"
CARDS = (GAUDI2, GAUDI3, ASCEND910B)
