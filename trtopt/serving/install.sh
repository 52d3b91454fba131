#!/bin/sh
# Installs what this folder holds, without a network, into a virtual environment:
#
#   sh install.sh [FOLDER]        FOLDER: the environment; default: venv, beside this script
#
# The Python is $PYTHON, else python@PYTHON@, else python3. Nothing outside of FOLDER is written.
set -eu
unset PYTHONPATH PYTHONHOME
start=$PWD
cd "$(dirname "$0")"
here=$PWD
case ${1:-} in
    '') venv=$here/venv ;;
    /*) venv=$1 ;;
    *) venv=$start/$1 ;;
esac
fail() { echo "install.sh: $*" >&2; exit 1; }

[ "$(uname -m)" = @MACHINE@ ] || fail "this is for @MACHINE@; this machine is $(uname -m)"
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc 2\.//p')
[ -z "$glibc" ] || [ "$glibc" -ge @GLIBC@ ] || fail "this is for glibc 2.@GLIBC@ or newer; this machine has 2.$glibc"
python=${PYTHON:-python@PYTHON@}
command -v "$python" >/dev/null 2>&1 || python=python3
command -v "$python" >/dev/null 2>&1 || fail "there is no ${PYTHON:-python@PYTHON@}: name one with PYTHON=/path/to/python@PYTHON@"
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python doesn't start"
[ "$found" = @PYTHON@ ] || fail "this is for Python @PYTHON@; $python is $found: name another with PYTHON=/path/to/python@PYTHON@"

# Only what is listed, and all of it, unchanged.
"$python" -I - <<'CHECK' || fail "the bundle isn't as it was made: copy it again"
import hashlib, os, sys
listed = {}
with open("SHA256SUMS", encoding="utf-8") as file:
    for line in file:
        digest, path = line.rstrip("\n").split("  ", 1)
        listed[path] = digest
for top in ("wheels", "model"):
    if os.path.islink(top):
        sys.exit("%s is a link" % top)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            place = folder + "/" + name
            if os.path.islink(place):
                sys.exit("%s is a link" % place)
            if name in files and place not in listed:
                sys.exit("%s isn't in SHA256SUMS" % place)
for path, digest in listed.items():
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                found.update(block)
    except OSError as error:
        sys.exit("%s: %s" % (path, error.strerror))
    if found.hexdigest() != digest:
        sys.exit("%s was changed" % path)
CHECK

"$python" -I -m venv --without-pip "$venv" || fail "$python can't make a virtual environment in $venv"
pip=$(echo wheels/pip-*.whl)
"$venv/bin/python" "$pip/pip" install --quiet --disable-pip-version-check --no-index --find-links wheels \
    --requirement requirements.txt || fail "the wheels can't be installed"
"$venv/bin/trtopt" --help >/dev/null || fail "trtopt doesn't start in $venv"
echo "installed in $venv. Next:"
printf '  cd %s && %s/bin/' "$here/model" "$venv"
cat <<'NEXT'
@NEXT@
NEXT
