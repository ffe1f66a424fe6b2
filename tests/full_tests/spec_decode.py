"""Generate with one way of drafting, or several, and report what each gained; the script that users run.

PT_HPU_LAZY_MODE=1 python tests/full_tests/spec_decode.py --task ngram --osl 512
PT_HPU_LAZY_MODE=1 python tests/full_tests/spec_decode.py --task compare --osl 64

`gaudi-spec demo` is the same program with the options of `make demo`; --help lists them.
"""

import sys

from vllm_gaudi_spec.tools.compare.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], command=("python", sys.argv[0])))
