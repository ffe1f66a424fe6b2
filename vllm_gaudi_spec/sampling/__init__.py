"""Pure functions with static shapes that sample tokens from logits and never wait for the device."""
