#!/usr/bin/env bash
# Build the wheel and the source distribution in dist/, and prove them: what PyPI would show, what lies in the wheel,
# and that it works where nothing else is installed, with every Python of 3.11 to 3.14 that this machine has. The steps of
# the Dockerfiles are run, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=$PWD/.venv/bin/python

rm -rf dist
"$py" -m build --quiet --outdir dist .
"$py" -m twine check --strict dist/*
wheel=$(echo dist/*.whl)
size=$(stat -c %s "$wheel")
if [ "$size" -gt 600000 ]; then echo "build: $wheel has $size bytes, 600,000 are allowed" >&2; exit 1; fi
files=$("$py" -m zipfile --list "$wheel" | awk '{print $1}')
if others=$(grep -vE '^(File|batchinfer(-[0-9.]+\.dist-info)?/)' <<<"$files"); then
  echo "build: $wheel has more than the package: $others" >&2
  exit 1
fi

if command -v pyenv >/dev/null; then
  PYENV_VERSION=$(pyenv versions --bare | grep -E '^3\.1[1-4]\.' | paste -sd:)
  export PYENV_VERSION
fi
bare=$(mktemp -d)
trap 'rm -rf "$bare"' EXIT
printf '{"text": "one"}\n{"text": "two"}\n' >"$bare/two.jsonl"
for python in python3.11 python3.12 python3.13 python3.14; do
  "$python" --version >/dev/null 2>&1 || continue
  "$python" -m venv "$bare/$python"
  "$bare/$python/bin/pip" install --quiet --quiet --disable-pip-version-check "$wheel"
  (
    cd "$bare"
    export PATH="$bare/$python/bin:$PATH"
    batchinfer --help >/dev/null
    [ "$(batchinfer --version)" = "batchinfer, version $(basename "$wheel" | cut -d- -f2)" ]
    {
      batchinfer split two.jsonl --output "job-$python" --num-chunks 2
      batchinfer run two.jsonl -o "$python.jsonl" --engine echo --prompt-column text
    } >log 2>&1 || { cat log >&2; exit 1; }
    [ "$(grep -c '"text":"two"' "$python.jsonl")" = 1 ]
  )
  echo "build: $(basename "$wheel"), $((size / 1000)) KB, works with $("$python" --version)"
done
bash scripts/image_steps.sh examples/docker/Dockerfile
bash scripts/image_steps.sh examples/docker/cpu.Dockerfile
