# shellcheck shell=bash
# Sourced by the benchmarks that measure ModelOpt. Its dependencies conflict with trtopt's, so it gets a throw-away environment;
# where it can't be installed, MODELOPT_REASON says why.
#
#   make_modelopt FOLDER        sets MODELOPT_PYTHON

make_modelopt() {
    if .venv-test/bin/python -m venv --without-pip "$1" \
        && .venv-test/bin/uv pip install --quiet --python "$1/bin/python" 'nvidia-modelopt[onnx]' 2>"$1/install.log"; then
        export MODELOPT_PYTHON=$1/bin/python
    else
        MODELOPT_REASON="nvidia-modelopt can't be installed: $(tail -n 1 "$1/install.log" 2>/dev/null)"
        export MODELOPT_REASON
    fi
}
