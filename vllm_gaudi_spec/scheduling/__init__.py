"""How far to speculate, decided where vLLM schedules: one decision for all ranks, and sent to them with each step."""
