import sys

from vllm_gaudi_spec.cli import main

sys.exit(main())
