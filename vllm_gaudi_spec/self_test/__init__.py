"""The self-test: checks on the device itself what the engine relies on, before it serves anything.

Its graphs are called `self_test_...` in reports.
"""
