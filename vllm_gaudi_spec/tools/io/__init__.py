"""Options, output, and prompts shared by all commands."""
