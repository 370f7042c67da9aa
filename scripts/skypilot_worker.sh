#!/usr/bin/env bash
# Run one worker from the environment that worker.yaml or pool-job.yaml describes. Becomes the
# worker (exec), so that signals reach it and its exit status is the job's.
#
#   OUTPUT_BUCKET                required
#   MODEL_NAME                   required, unless `batchinfer launch` was given none, as for an endpoint
#   DATA_BUCKET                  the job; needed unless MANIFEST_URL lies in one
#   MANIFEST_URL                 a URL or a path here; empty: this worker's share by its rank
#   WORKER_ARGS                  further options, quoted as on a command line
#   WORKER_WORDS                 further options as words of bash; `batchinfer launch` sets it
#
# With num_nodes above 1, the job's machines run one model together: the first is the worker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { echo "skypilot_worker: $*" >&2; exit 2; }
[ -n "${MODEL_NAME:-}${WORKER_WORDS:-}" ] || die "MODEL_NAME: is empty, expected a model's name or path. Add --env MODEL_NAME=…"
[ -n "${OUTPUT_BUCKET:-}" ] || die "OUTPUT_BUCKET: is empty, expected where the run lies. Add --env OUTPUT_BUCKET=s3://…"
[ -n "${DATA_BUCKET:-}${MANIFEST_URL:-}" ] || die "DATA_BUCKET: is empty, expected the job's URL. Add --env DATA_BUCKET=s3://…"

# r2:// is SkyPilot's spelling: S3's protocol at Cloudflare, with the credentials that SkyPilot
# brought along.
as_url() {
  case "$1" in
    r2://*) echo "s3://${1#r2://}" ;;
    *://* | /*) echo "$1" ;;
    *) echo "s3://$1" ;;
  esac
}
case "$OUTPUT_BUCKET ${DATA_BUCKET:-} ${MANIFEST_URL:-}" in
  *r2://*)
    if [ -z "${AWS_ENDPOINT_URL:-}" ]; then
      for url in "$OUTPUT_BUCKET" "${DATA_BUCKET:-}" "${MANIFEST_URL:-}"; do
        case "$url" in
          r2://* | "") ;;
          *) case "$(as_url "$url")" in
              s3://*) die "$url: is on S3 and another bucket on r2://, expected both in one place. Copy one of them, or, if both are at one endpoint, add --env AWS_ENDPOINT_URL=…" ;;
            esac ;;
        esac
      done
      [ -r ~/.cloudflare/accountid ] \
        || die "r2://: no account id at ~/.cloudflare/accountid. Run 'sky check cloudflare' where you launch from, or add --env AWS_ENDPOINT_URL=…"
      AWS_ENDPOINT_URL=https://$(tr -d '[:space:]' <~/.cloudflare/accountid).r2.cloudflarestorage.com
      export AWS_ENDPOINT_URL AWS_DEFAULT_REGION=auto
      export AWS_PROFILE=${AWS_PROFILE:-r2}
      export AWS_SHARED_CREDENTIALS_FILE=${AWS_SHARED_CREDENTIALS_FILE:-$HOME/.cloudflare/r2.credentials}
    fi
    ;;
esac

arguments=()
if [ -n "${MODEL_NAME:-}" ]; then arguments+=(--model "$MODEL_NAME"); fi
arguments+=(--output "$(as_url "$OUTPUT_BUCKET")")
if [ -n "${DATA_BUCKET:-}" ]; then arguments+=(--job "$(as_url "$DATA_BUCKET")"); fi
if [ -n "${MANIFEST_URL:-}" ]; then arguments+=(--manifest "$(as_url "$MANIFEST_URL")"); fi
if [ "${SKYPILOT_NUM_NODES:-1}" -gt 1 ]; then
  read -r first <<<"$SKYPILOT_NODE_IPS"
  arguments+=(--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$first")
  if [ "$SKYPILOT_NODE_RANK" -gt 0 ]; then arguments+=(--headless); fi
fi
# xargs splits at blanks and understands quotes, and runs nothing that it reads. The dot keeps
# the shell from dropping an empty last word.
words=$(xargs -r printf '%s\n' <<<"${WORKER_ARGS:-}" && echo .) \
  || die "WORKER_ARGS: is '$WORKER_ARGS', expected options quoted as on a command line"
mapfile -t further <<<"$words"
unset 'further[-1]'

# Not the worker's to read: the manifest is given above, or there is none; and an empty token is
# no token.
unset DATA_METADATA
if [ -z "${HF_TOKEN:-}" ]; then unset HF_TOKEN; fi

eval "exec .venv/bin/batchinfer worker ${WORKER_WORDS:-} \"\${arguments[@]}\" \"\${further[@]}\""
