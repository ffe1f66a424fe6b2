"""Decides how far to speculate where vLLM schedules, so that all ranks get the same decision with a step."""
