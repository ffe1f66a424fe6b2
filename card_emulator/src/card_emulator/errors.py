"""Errors that stop the set-up of an emulated card."""


class SetupError(RuntimeError):
    """Raised if a card cannot be emulated here. The message says why and what to do, in one line where possible."""
