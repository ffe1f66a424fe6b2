"""In the place of CANN's Python package."""
