"""lm-eval's local-completions: python tests/clients/lm_eval_calls.py http://127.0.0.1:8000/v1

Prints one JSON object with the client's version and what each call returned; tests/full_tests/test_clients.py compares.
The tokenizer is the server's, which needs --enable-tokenizer-info-endpoint.
"""

import json
import sys
from importlib.metadata import version

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

QUICK = "The quick"


def request(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def main() -> None:
    model = LocalCompletionsAPI(
        base_url=f"{sys.argv[1]}/completions",
        model="tiny",
        tokenizer_backend="remote",
        max_length=512,
        num_concurrent=1,
    )
    texts = model.generate_until(
        [request("generate_until", QUICK, {"until": ["\0"], "max_gen_toks": 40, "temperature": 0})]
    )
    choices = [request("loglikelihood", QUICK, text) for text in (" brown fox", " lazy dog")]
    found = {
        "generate_until": texts[0],
        "loglikelihood": [total for total, _ in model.loglikelihood(choices)],
    }
    print(json.dumps({"version": version("lm-eval"), "calls": found}))


if __name__ == "__main__":
    main()
