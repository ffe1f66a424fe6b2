"""Integrations into other platforms, each with its own version checks and patches."""
