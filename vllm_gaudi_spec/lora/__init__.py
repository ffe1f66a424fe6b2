"""LoRA adapters for vLLM's layers, with the same shapes for all adapters.

`application.py` computes the contribution of adapters to a layer's output, and `manager.py` loads adapters into slots.
`runner/extensions/adapters.py` assigns slots to rows.
"""
