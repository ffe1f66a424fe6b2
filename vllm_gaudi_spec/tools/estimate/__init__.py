"""How long a step of a model takes on a card that is not here: amounts from the model's files, times by the cost model.

The cost model (`card_emulator/cost.py`) has three constants that were fitted on one GPU; its figures for another card
are held against measurements in tests/unit/tools/test_estimate.py where there are any.
"""
