"""Ways of drafting side by side on one model: what `gaudi-spec demo` and tests/full_tests/spec_decode.py run."""
