"""The checks of `gaudi-spec doctor`. Checks that may crash, as importing torch and vLLM, run in a child process."""
