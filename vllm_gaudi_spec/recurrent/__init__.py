"""Support for layers with a recurrent state, such as Mamba and gated delta nets, together with speculation."""
