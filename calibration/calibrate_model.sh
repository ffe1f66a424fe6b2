#!/usr/bin/env bash
# Run all steps of a calibration. Run again with the same options, it repeats no measurement.
set -euo pipefail

usage() {
    cat <<'END'
usage: calibrate_model.sh MODEL --out FOLDER [options]

Make FP8 scales for MODEL, a folder or Hugging Face id, and for its drafter. Uses the Python that the variable PYTHON
names, the one of `make setup`, or python3.

  --out FOLDER              folder for the calibration; to continue an interrupted one, pass the same folder
  --draft DRAFT             the drafter (default: only MODEL is calibrated)
  --method NAME             speculation method, as in vLLM (default: draft_model)
  --num-speculative-tokens K  drafts per step (default: 3)
  --prompts SOURCE          a .jsonl or .txt file, a folder of .txt files, or a Hugging Face data set (default: a built-in set)
  --limit N                 use the first N prompts
  --chat                    apply MODEL's chat template to each prompt
  --card gaudi2|gaudi3      card for which to make scales (default: this machine's, or gaudi2 without a Gaudi)
  --tensor-parallel-size N  ranks to measure with (default: 1)
  --world-size N            ranks that will serve (default: as many as measured)
  --scale-method NAME       method for the scales; may be repeated (default: all)
  --exclude REGEX           modules that stay in high precision; may be repeated
  --allow-unseen            leave modules that saw no value in high precision
  --engine JSON             additional options for vllm.LLM while measuring
  --fresh                   delete earlier measurements in FOLDER
END
}

fail() {
    echo "calibrate_model.sh: error: $1" >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=python3

model= out= draft= chat=
prompts=() measure=() card=() unseen=() world=() scales=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --fresh) measure+=("$1"); shift; continue ;;
        --allow-unseen) unseen+=("$1"); shift; continue ;;
        --chat) chat=1; shift; continue ;;
        -*) [ $# -gt 1 ] || fail "$1 needs a value" ;;
        *) [ -z "$model" ] || fail "only one model can be given, got also $1"; model=$1; shift; continue ;;
    esac
    case $1 in
        --out) out=$2 ;;
        --draft) draft=$2; measure+=("$1" "$2") ;;
        --method | --num-speculative-tokens | --tensor-parallel-size | --engine) measure+=("$1" "$2") ;;
        --prompts | --limit) prompts+=("$1" "$2") ;;
        --card) card+=("$1" "$2") ;;
        --world-size) world+=("$1" "$2") ;;
        --scale-method | --exclude) scales+=("$1" "$2") ;;
        *) fail "unknown option $1 (--help lists them)" ;;
    esac
    shift 2
done
[ -n "$model" ] || fail "the model is missing (--help)"
[ -n "$out" ] || fail "--out is missing"
[ -z "$chat" ] || prompts+=(--chat "$model")
drafter=()
[ -z "$draft" ] || drafter=(--draft "$draft")

step() {
    echo "[$1/6] $2"
    shift 2
    "$python" "$here/$1" --out "$out" "${@:2}"
}

step 1 "device" step_1_detect_device.py "${card[@]}"
step 2 "prompts" step_2_prepare_prompts.py "${prompts[@]}"
step 3 "measuring" step_3_measure.py "$model" "${measure[@]}"
step 4 "checks of what was measured" step_4_postprocess.py --model "$model" "${drafter[@]}" "${unseen[@]}"
step 5 "ranks" step_5_unify_ranks.py --model "$model" "${world[@]}"
step 6 "scales" step_6_make_scales.py --model "$model" "${drafter[@]}" "${scales[@]}"
