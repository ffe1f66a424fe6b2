"""Options, output and prompts, which the commands share."""
