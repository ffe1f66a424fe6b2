"""Errors raised while an emulated card is set up."""


class SetupError(RuntimeError):
    """Raised if a card cannot be emulated here. The message gives the cause and the remedy, if possible in one line."""
