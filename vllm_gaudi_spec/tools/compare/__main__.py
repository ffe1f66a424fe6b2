"""The engine part of `gaudi-spec demo`, in a process whose environment the command has set."""

import sys

from vllm_gaudi_spec.tools.compare.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], command=("gaudi-spec", "demo")))
