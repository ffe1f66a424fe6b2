"""Ascend NPUs."""
