"""Command-line tools around the engine, which imports none of them."""
