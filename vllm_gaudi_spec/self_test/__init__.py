"""The self-test: checks the engine's assumptions on the device itself before anything is served.

Reports list its graphs as `self_test_...`.
"""
