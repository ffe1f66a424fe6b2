"""What `gaudi-spec doctor` looks at. What may crash, as importing torch and vLLM, runs in a process of its own."""
