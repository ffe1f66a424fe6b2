"""Decisions about how far to speculate, made where vLLM schedules, so that all ranks get the same one with a step."""
