#!/usr/bin/env bash
# What each find begins with: a temporary environment of torch and the named packages.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
export PATH=$dir/bin:$PATH OMP_NUM_THREADS=1
pip install -q --no-compile torch==2.13.0 numpy "$@"
pip freeze | grep "^torch"

# Runs the program on standard input: ranks HOW_MANY [ARGUMENT...]
ranks() {
    cat >"$dir/find.py"
    torchrun --standalone --local-ranks-filter 0 --nproc-per-node "$1" "$dir/find.py" "${@:2}"
}
