"""The record of a run, and the page that a person reads."""
