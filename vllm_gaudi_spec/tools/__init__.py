"""Commands beside the engine, which imports none of them."""
