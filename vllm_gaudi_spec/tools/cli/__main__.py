import sys

from vllm_gaudi_spec.tools.cli import main

sys.exit(main())
