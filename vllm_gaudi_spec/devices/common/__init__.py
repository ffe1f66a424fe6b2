"""Code that several devices share."""
