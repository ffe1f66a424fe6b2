"""Compares speculation methods on one model, for `gaudi-spec demo` and tests/full_tests/spec_decode.py."""
