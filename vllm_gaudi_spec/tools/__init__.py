"""Command-line tools for the engine. The engine imports none of them."""
