"""A running server over HTTP: what `gaudi-spec top` and `gaudi-spec chat` show of it. Needs neither vLLM nor torch."""
