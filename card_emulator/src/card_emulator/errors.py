"""Errors raised while an emulated card is set up."""


class SetupError(RuntimeError):
    """Raised if a card cannot be emulated. The message states the cause and the remedy."""
