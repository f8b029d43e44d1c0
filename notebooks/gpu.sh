#!/usr/bin/env bash
# What is worth a GPU, in parts that each end within MINUTES (9 unless told) and go on where they were when called again:
#
#   notebooks/gpu.sh PART OUT DATA [MODEL] [OPTION...]
#
#   tests      the tests that need a GPU; DATA is not read
#   fit        the embedded example by training.fit, in bfloat16: that everything runs on the device at all
#   sst2       full SST-2 (DATA/sst2) with a local encoder MODEL, such as all-MiniLM-L6-v2: 5 seeds, 18, 9 and 4 heads of 72
#   encoder    Multi30k (DATA/multi30k) at the width of Voita et al. 2019: 10 of the 48 encoder heads
#   all        the same model with 26 of its 144 heads
#   gpt        a small GPT on novels (DATA/novels, prepared as notebooks/results/README.md says), 3 seeds: 36, 24 and 12 of 48 heads;
#              where there is a DATA/novels/brown.txt, it is judged on that too
#   groups     the same with 18, 12 and 6 of its 24 groups of heads that share a key and a value
#   benchmark  what gates, scores and pruned models cost, at the shape of BERT-base; DATA is not read
#
# OPTIONs go to the command, such as --seeds 0. Tables, masks and the report of each part are in OUT/PART, with versions, machine
# and the command in metrics.json. Where the machine lacks packages, WHEELS names a folder of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ $# -lt 3 ]]; then sed -n '2,17p' "$0" >&2; exit 2; fi
part=$1 out=$2 data=$3 model=
shift 3
if [[ $# -gt 0 && $1 != --* ]]; then model=$1; shift; fi
python=${PYTHON:-python3} minutes=${MINUTES:-9}
export WANDB_MODE=${WANDB_MODE:-disabled} PYTHONUNBUFFERED=1
if [[ -n ${WHEELS:-} ]]; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
common=(--run_dir "$out/$part" --trainer.accelerator "${ACCELERATOR:-gpu}" --trainer.devices 1 --trainer.precision bf16-mixed)
pairs=()
for name in train:train select:val test:test_2016_flickr; do
  pairs+=(--data."${name%%:*}"_source "$data/multi30k/${name#*:}.en.gz" --data."${name%%:*}"_target "$data/multi30k/${name#*:}.de.gz")
done
wide=(--data.batch_tokens 4096 --model.from_scratch.d_model 512 --model.from_scratch.encoder_ffn_dim 1024
  --model.from_scratch.decoder_ffn_dim 1024 --model.from_scratch.dropout 0.3 --model.learning_rate 7e-4
  --model.prune_learning_rate 2.3e-4 --model.finetune 30 --average_every 25)
scores="obs,his,hies,entropy(keep=high),entropy,random"
five=(--seeds 0,1,2,3,4)
stages=(--stages "post hoc,retrained from dense")
on=${ACCELERATOR:-cuda}
tested() {  # on the device of the parts
  HEAD_GATES_GPU_TESTS_ON=${on/gpu/cuda} timeout --signal=INT --kill-after=30 "${minutes}m" \
    "$python" -m pytest -q -m gpu -p no:cacheprovider -W ignore::DeprecationWarning "$@"
}
case $part in
  tests) tested "$@"; exit ;;
  fit) command=(training.fit --config configs/default.yaml --existing resume) ;;
  sst2)
    command=(training compare --config configs/sst2_minilm_local.yaml --model.backbone "$model" --data.columns null
      --data.train_file "$data/sst2/train.tsv.gz" --data.select_file "$data/sst2/dev.tsv" --data.test_file "$data/sst2/test.tsv"
      --budgets 18,9,4 --methods "learned,learned+refit,learned+restarts+refit,his+refit,obs+refit,$scores" "${five[@]}"
      "${stages[@]}")
    ;;
  encoder)
    command=(training compare --config configs/multi30k_scratch.yaml "${pairs[@]}" "${wide[@]}" "${five[@]}"
      --methods "learned,$scores" --budgets '{encoder: 10}' "${stages[@]}")
    ;;
  all)
    command=(training compare --config configs/multi30k_scratch.yaml "${pairs[@]}" "${wide[@]}" "${five[@]}"
      --methods "learned,learned+refit,obs+refit,his+refit,$scores" --budgets 26 --model.freeze_while_pruning null
      "${stages[@]}")
    ;;
  gpt | groups)
    counted=(--budgets 36,24,12)
    if [[ $part == groups ]]; then counted=(--model.unit group --budgets 18,12,6); fi
    other=()
    if [[ -e $data/novels/brown.txt ]]; then other=(--data.more_tests "{brown: $data/novels/brown.txt}"); fi
    command=(training compare --config configs/gpt_novels.yaml --data.train_file "$data/novels/train.txt"
      --data.select_file "$data/novels/valid.txt" --data.test_file "$data/novels/test.txt"
      --methods "learned,learned+refit,learned(start=obs)+refit,obs+refit,his,his+refit,hies,entropy(keep=high),entropy,random"
      --seeds 0,1,2 "${counted[@]}" "${other[@]}" "${stages[@]}")
    ;;
  benchmark)
    device=${ACCELERATOR:-cuda}
    command=(tools.benchmark --device "${device/gpu/cuda}")
    common=(--run_dir "$out/$part")
    ;;
  *) echo "unknown part '$part'; expected tests, fit, sst2, encoder, all, gpt, groups or benchmark" >&2; exit 2 ;;
esac
[[ $part == fit && ! -e $out/$part/config.yaml ]] && command=("${command[@]/resume/refuse}")
timeout --signal=INT --kill-after=30 "${minutes}m" "$python" -m "${command[@]}" "${common[@]}" "$@" || ended=$?
if [[ ${ended:-0} == 124 || ${ended:-0} == 137 ]]; then echo "not finished after $minutes minutes; the same command continues"; fi
exit "${ended:-0}"
