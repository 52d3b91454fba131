# shellcheck shell=bash
# Sourced by what measures on a GPU host, where nothing is installed for it. Sets root, this checkout, and python, which imports
# trtopt from it: $PY, else .venv-test's, else python3.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PY:-}
[ -n "$python" ] || { [ -x "$root/.venv-test/bin/python" ] && python=$root/.venv-test/bin/python; } || python=python3
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}" CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-LAZY}"
