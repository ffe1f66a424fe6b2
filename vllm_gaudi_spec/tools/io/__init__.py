"""Options, output, and prompts that the commands share."""
