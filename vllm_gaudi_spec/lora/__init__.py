"""LoRA adapters on vLLM's layers, in one shape whatever the adapters.

`application.py` computes what an adapter adds to a layer's output, `manager.py` loads adapters and puts them in slots,
`adapters.py` assigns slots to rows.
"""
