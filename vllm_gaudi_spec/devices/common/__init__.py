"""Code shared by several devices."""
