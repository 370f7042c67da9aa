#!/usr/bin/env bash
# Run the tests of the engine with several versions of vLLM's CPU build, each in an environment of its own, and write
# the table of docs/compatibility.md. Some ten minutes a version, and 3 GB of disk.
#
#   scripts/compat.sh 0.31.0 0.32.0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

table=$(mktemp)
trap 'rm -f "$table"' EXIT
for version in "$@"; do
  bash scripts/setup.sh --vllm "$version"
  python=.venv-vllm-$version/bin/python
  # Tests fail where a version does less; which ones is the result.
  said=$("$python" -m pytest -q -m vllm tests/engines tests/prompts tests/playground --tb=no 2>/dev/null || true)
  failed=$(sed -n 's/^\(FAILED\|ERROR\) [^ ]*::\([^ ]*\).*/`\2`/p' <<<"$said" | sort -u | paste -sd' ' | sed 's/ /, /g')
  counts=$(tail -1 <<<"$said" | grep -oE '[0-9]+ (passed|failed|error)s?' | paste -sd' ')
  transformers=$("$python" -c 'import importlib.metadata as m; print(m.version("transformers"))')
  echo "| $version | $transformers | $counts | ${failed:-none} |" | tee -a "$table"
done
{
  echo "# Versions of vLLM"
  echo
  echo "\`make compat\` runs the tests of the engine that need a real server with several CPU builds of vLLM, each in an"
  echo "environment of its own, and writes this page. The extra \`vllm\` takes the versions that pass all of them."
  echo
  echo "| vLLM | transformers | tests | failed |"
  echo "|---|---|---|---|"
  cat "$table"
} >docs/compatibility.md
