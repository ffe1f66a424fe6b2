"""The self-test, which checks on the device that the engine's assumptions hold, before anything is served.

The names of the graphs that it captures start with `self_test_` in reports.
"""
