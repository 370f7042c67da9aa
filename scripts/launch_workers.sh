#!/usr/bin/env bash
# Submit workers to SkyPilot and return. Running it again is harmless: workers skip what is done
# and share what is left.
#
#   scripts/launch_workers.sh --job s3://b/job --run s3://b/job/runs/llama --model NAME --workers 16 \
#     -- --messages-column conversation --max-tokens 512
#
#   --job URL         the job that `batchinfer split` wrote
#   --run URL         where the run lies (created by the first worker)
#   --model NAME      on the Hub, or a path on the machines
#   --workers N       one submission, the workers divide the job by their rank
#   --manifests DIR   instead of --workers: one job for each *.txt in a local folder
#   --pool NAME       on the machines of this pool (see examples/skypilot/), with --workers
#   --name NAME       name of the jobs (default: batchinfer)
#   --extra EXTRA     what to install on the machines (default: vllm; cpu needs no GPU)
#   --gpus SPEC       instead of worker.yaml's set, as in L4:1 or H100:8; none for CPU machines
#   --env KEY=VALUE   further environment of the workers; may be repeated
#   --dry-run         print the commands, submit nothing
#   -- OPTIONS        further options for `batchinfer worker`
#
# HF_TOKEN travels as a secret if it is set here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }
die() { echo "launch_workers: $*. See scripts/launch_workers.sh --help" >&2; exit 2; }

job="" run="" model="" workers="" manifests="" pool="" name=batchinfer extra="" gpus=""
dry_run=no
sky_options=()
worker_options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --job | --run | --model | --workers | --manifests | --pool | --name | --extra | --gpus | --env)
      [ $# -ge 2 ] || die "$1: has no value"
      ;;&
    --job) job=$2; shift 2 ;;
    --run) run=$2; shift 2 ;;
    --model) model=$2; shift 2 ;;
    --workers) workers=$2; shift 2 ;;
    --manifests) manifests=$2; shift 2 ;;
    --pool) pool=$2; shift 2 ;;
    --name) name=$2; shift 2 ;;
    --extra) extra=$2; shift 2 ;;
    --gpus) gpus=$2; shift 2 ;;
    --env) sky_options+=(--env "$2"); shift 2 ;;
    --dry-run) dry_run=yes; shift ;;
    --) shift; worker_options=("$@"); break ;;
    -h | --help) usage; exit 0 ;;
    *) die "$1: unknown option" ;;
  esac
done

[ -n "$job" ] || die "--job: is missing, expected the job's URL"
[ -n "$run" ] || die "--run: is missing, expected where the run lies"
[ -n "$model" ] || die "--model: is missing, expected a model's name or path"
if [ -n "$workers" ] && [ -n "$manifests" ]; then die "--workers and --manifests: expected one of them"; fi
if [ -z "$workers" ] && [ -z "$manifests" ]; then die "--workers: is missing, expected how many"; fi
if [ -n "$workers" ]; then
  [[ "$workers" =~ ^[1-9][0-9]*$ ]] || die "--workers: is '$workers', expected a count from 1"
fi
if [ -n "$pool" ]; then
  [ -z "$manifests" ] || die "--pool: takes no local manifests, expected --workers"
  [ -z "$extra" ] || die "--pool: its machines are set up already, expected no --extra"
fi
if [ "$dry_run" = no ]; then
  command -v sky >/dev/null || die "sky: not found, expected SkyPilot on PATH (pip install skypilot)"
fi

yaml=worker.yaml
if [ -n "$pool" ]; then yaml=examples/skypilot/pool-job.yaml sky_options+=(-p "$pool"); fi
if [ -n "$extra" ]; then sky_options+=(--env "BATCHINFER_EXTRA=$extra"); fi
if [ -n "$gpus" ]; then sky_options+=(--gpus "$gpus"); fi
# As scripts/skypilot_worker.sh reads it: a backslash before what would split or quote.
worker_args=""
for word in ${worker_options[@]+"${worker_options[@]}"}; do
  case "$word" in
    *$'\n'*) die "'$word': holds a line break, expected one line. Put long texts into a file" ;;
    "") worker_args+=' ""' ;;
    *) worker_args+=" $(sed "s/[[:blank:]\"'\\\\]/\\\\&/g" <<<"$word")" ;;
  esac
done
if [ -n "$worker_args" ]; then sky_options+=(--env "WORKER_ARGS=${worker_args# }"); fi
if [ -n "${HF_TOKEN:-}" ]; then sky_options+=(--secret HF_TOKEN); fi
sky_options+=(--env "DATA_BUCKET=$job" --env "OUTPUT_BUCKET=$run" --env "MODEL_NAME=$model")

submit() {
  if [ "$dry_run" = yes ]; then
    printf '%q ' sky jobs launch -y -d "$@"
    echo
  else
    sky jobs launch -y -d "$@"
  fi
}

if [ -n "$workers" ]; then
  submit -n "$name" --num-jobs "$workers" "$yaml" "${sky_options[@]}"
  exit
fi

shopt -s nullglob
files=("$manifests"/*.txt)
[ "${#files[@]}" -gt 0 ] || die "$manifests: holds no *.txt, expected one manifest a worker"
failed=0
for file in "${files[@]}"; do
  worker=$(basename "$file" .txt)
  # all.txt lies beside the workers' manifests and holds every chunk.
  if [ "$worker" = all ] && [ "${#files[@]}" -gt 1 ]; then continue; fi
  submit -n "$name-$worker" "$yaml" --env "DATA_METADATA=$file" "${sky_options[@]}" || failed=$((failed + 1))
done
[ "$failed" = 0 ] || { echo "launch_workers: $failed submissions failed; run it again, workers share what is left" >&2; exit 1; }
