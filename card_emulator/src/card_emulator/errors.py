"""What stops an emulated card from being set up."""


class SetupError(RuntimeError):
    """A card cannot be emulated here. The message says why and what to do, in one line where possible."""
