"""Errors that stop the set-up of an emulated card."""


class SetupError(RuntimeError):
    """A card cannot be emulated here. The message says why and what to do, in one line where possible."""
