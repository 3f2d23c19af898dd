# Sourced by run.sh and run_tests.sh: makes .venv beside them, installs the project with the extras in $1, activates it.
# PYTHON=python3.12 ./run.sh chooses another interpreter.

make_venv() {
    local extras=$1 python=${PYTHON:-python3} wanted
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
        echo "mhc_ops needs Python 3.10 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3." >&2
        exit 1
    }
    wanted="$extras $(cat pyproject.toml constraints.txt | cksum)"
    if [ "$(.venv/bin/python --version 2>&1)" != "$("$python" --version 2>&1)" ] ||
        ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        echo "Making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv || {
            echo "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2
            exit 1
        }
    fi
    if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
        echo "Installing mhc_ops[$extras] into .venv (PyTorch is a large download; minutes, once)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" || {
            echo "Installation failed: pip's message above says why. To use a PyTorch you already have:" >&2
            echo "    pip install -e . && mhc-ops check" >&2
            exit 1
        }
        echo "$wanted" >.venv/installed
    fi
    # shellcheck disable=SC1091
    . .venv/bin/activate
}
