"""Integrations into other platforms, each with separate version checks and patches."""
