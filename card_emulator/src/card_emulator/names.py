"""The names of the cards that can be emulated."""

GAUDI2, GAUDI3 = "gaudi2", "gaudi3"
ASCEND910B = "ascend910b"
CARDS = (GAUDI2, GAUDI3, ASCEND910B)
