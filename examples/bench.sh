#!/usr/bin/env bash
# Measure the throughput without and with speculation, and the speedup. The same requests go to two servers, one by one.
#
#   examples/bench.sh
#   MODEL=Qwen/Qwen3-1.7B SPECULATION='{"method": "suffix", "num_speculative_tokens": 4}' examples/bench.sh --max-model-len 4096
#
# PROMPTS is a folder of *.txt files or a JSONL file. Other arguments are passed to both servers. The output of the
# servers and the benchmark is written to .bench/example/.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH=$root/.venv/bin:$PATH VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
model=${MODEL:-$(python -m vllm_gaudi_spec.tools.demo_model)}
ngram='{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
url=http://127.0.0.1:${PORT:-8123}
work=${WORK:-$root/.bench/example}
server=
mkdir -p "$work"

fail() { echo "error: $*" >&2; exit 1; }
stop() { [ -z "$server" ] || { kill "$server" 2> /dev/null || true; wait "$server" || true; server=; }; }
trap stop EXIT

measure() {  # arguments: a name, and options for the server
    local name=$1; shift
    echo "$name: starting a server, then ${REQUESTS:-16} requests of ${TOKENS:-64} tokens, concurrency ${CONCURRENCY:-1}" >&2
    vllm serve "$model" --host 127.0.0.1 --port "${PORT:-8123}" "$@" > "$work/$name-server.log" 2>&1 & server=$!
    for ((second = 0; ; second++)); do
        kill -0 "$server" 2> /dev/null || fail "the server ended: $(tail -n 1 "$work/$name-server.log")"
        ! curl -sf -o /dev/null "$url/health" || break
        ((second < 1800)) || fail "the server is not ready after 1800 s; see $work/$name-server.log"
        sleep 1
    done
    vllm bench serve --base-url "$url" --model "$model" --dataset-name sharegpt --dataset-path "$work/prompts.json" \
        --sharegpt-output-len "${TOKENS:-64}" --num-prompts "${REQUESTS:-16}" --max-concurrency "${CONCURRENCY:-1}" \
        --num-warmups 2 --ignore-eos --temperature 0 --seed 0 --save-result --result-dir "$work" \
        --result-filename "$name.json" > "$work/$name.log" 2>&1 || fail "the benchmark failed; see $work/$name.log"
    stop
}

! curl -s -o /dev/null "$url" || fail "something answers at $url already; set PORT to another"
python - "${PROMPTS:-$root/tests/full_tests/prompts}" > "$work/prompts.json" << 'END'
import json, pathlib, sys
from vllm_gaudi_spec.tools.io.prompts import load_prompts  # as in `gaudi-spec demo --prompts`
texts = load_prompts(sys.argv[1])
print(json.dumps([{"conversations": [{"value": text}, {"value": ""}]} for text in texts]))
END
measure plain "$@"
measure speculating "$@" --speculative-config "${SPECULATION:-$ngram}"
python - "$work" << 'END'
import json, pathlib, sys
plain, drafted = (json.loads((pathlib.Path(sys.argv[1]) / f"{n}.json").read_text()) for n in ("plain", "speculating"))
assert not plain["failed"] + drafted["failed"], "requests failed; see the logs"
without, with_drafts = plain["output_throughput"], drafted["output_throughput"]
print(f"without speculation {without:8.1f} tokens/s\nwith speculation    {with_drafts:8.1f} tokens/s, "
      f"{drafted['spec_decode_acceptance_length']:.2f} mean acceptance length\nspeedup             {with_drafts / without:8.2f}")
END
