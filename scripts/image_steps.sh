#!/usr/bin/env bash
# Run a Dockerfile's steps as they are written, without a builder and its base image, and use what comes out:
#
#   scripts/image_steps.sh examples/docker/Dockerfile
#
# A folder is the image: absolute paths lie below it, and a bare environment stands for the base image's Python. Three
# things are not as in a builder: useradd makes a home but no user, apt-get does nothing, and `setup.sh --extras cpu`
# (5 GB) installs no extra.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dockerfile=${1:?a Dockerfile}
checkout=$PWD
image=$(mktemp -d)
trap 'rm -rf "$image"' EXIT
fail() { echo "image_steps: $dockerfile: $*" >&2; exit 1; }

apt-get() { :; }
useradd() { echo "$*" >"$image/useradd"; mkdir -p "$image/home/${!#}"; }
python3 -m venv "$image/usr"
export PATH=$image/usr/bin:$PATH PIP_QUIET=2 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PIP_REQUIRE_VIRTUALENV

user="" command="" arguments=""
cd "$image"
while read -r step words; do
  words=$(sed -E "s#(^|[ =])/#\1$image/#g; s/--extras cpu /--extras '' /" <<<"$words")
  case "$step" in
    FROM) ;;
    COPY)
      for source in ${words% *}; do
        if [ -d "$checkout/$source" ]; then whole=-rT; else whole=""; fi
        cp ${whole:+"$whole"} "$checkout/$source" "${words##* }" || fail "COPY $words"
      done
      ;;
    RUN) (eval "$words") </dev/null || fail "RUN $words" ;;
    ENV) eval "export $words" ;;
    USER) user=$words ;;
    WORKDIR)
      # A builder makes it for root, whatever USER says: a user's own has to be there.
      if [ -z "$user" ]; then mkdir -p "$words"; fi
      cd "$words" || fail "WORKDIR $words: nobody made it"
      ;;
    ENTRYPOINT) command=$(tr -d '[],"' <<<"$words") ;;
    CMD) arguments=$(tr -d '[],"' <<<"$words") ;;
    *) fail "$step: is not known to this script" ;;
  esac
done < <(sed '/^#/d; /^$/d; :a; /\\$/{N; s/\\\n//; ba}' "$checkout/$dockerfile")

grep -q -- "--uid $user " "$image/useradd" || fail "USER $user: useradd made another, $(cat "$image/useradd")"
grep -q "runAsUser: $user$" "$checkout/batchinfer/clusters/kubernetes.yaml" || fail "USER $user: kubernetes.yaml has another"
case "$HF_HOME" in "$PWD"/*) ;; *) fail "HF_HOME $HF_HOME: is not in the home of USER" ;; esac
case "$(command -v "$command")" in "$image"/*) ;; *) fail "ENTRYPOINT $command: is not in the image" ;; esac
others=$(find "$image" -iregex '.*-packages/\(torch\|vllm.*\|nvidia.*\)-[0-9.]+.*\.dist-info')
if [ -n "$others" ]; then fail "RUN installs in place of the base image's: $others"; fi

# shellcheck disable=SC2086
"$command" $arguments | grep -q '^Usage: batchinfer worker' || fail "CMD $arguments: shows no help"
printf '{"text": "one"}\n{"text": "two"}\n' >two.jsonl
{
  "$command" split two.jsonl --output job --num-chunks 2
  "$command" run two.jsonl -o answers.jsonl --engine echo
} >log 2>&1 || fail "$(cat log)"
grep -q '"text":"two"' answers.jsonl || fail "the answers are $(cat answers.jsonl)"
machine=$("$command" check --machine 2>/dev/null || true) # the base image would bring the engine
grep -q '"machine":{' <<<"$machine" || fail "check --machine says $machine"
echo "image_steps: $dockerfile: its steps work"
