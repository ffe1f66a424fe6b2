"""The self-test, which verifies the engine's assumptions about a device by running code on it at startup.

The names of the graphs that it captures start with `self_test_` in reports.
"""
