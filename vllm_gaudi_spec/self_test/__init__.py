"""The self-test, which checks the engine's assumptions on the device itself before anything is served.

In reports, the names of its graphs start with `self_test_`.
"""
