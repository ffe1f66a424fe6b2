"""Pure functions with static shapes that sample tokens from logits. None of them waits for the device."""
