"""Errors raised while an emulated card is set up."""


class SetupError(RuntimeError):
    """Raised if a card cannot be emulated. The message contains the cause and the remedy, if possible in one line."""
