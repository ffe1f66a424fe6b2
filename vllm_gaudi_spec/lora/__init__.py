"""LoRA adapters on vLLM's layers, in one shape whatever adapters there are.

`application.py` computes what an adapter adds to a layer's output, `manager.py` loads adapters and puts them in slots.
Which slot a row has is the runner's business (`runner/adapters.py`).
"""
