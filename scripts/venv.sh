# Sourced by run.sh and run_tests.sh: makes .venv beside them, installs the project, activates it.
#   make_venv check      with what `mhc-ops check` needs
#   make_venv test       with what tests, lint, types and the site need in addition
#   PYTHON=python3.12    another interpreter; a ROCm build of PyTorch that it has is used as it is
#   TORCH_INDEX=URL      takes PyTorch from this package index, e.g. from one of ROCm builds
#   CPU=1                does not ask for the AMD GPU that is there

kfd=${KFD:-/dev/kfd} # what every AMD GPU that can compute has

fail() { printf '%s\n' "$@" >&2; exit 1; }

# A machine with an NVIDIA GPU has that one in mind, though the graphics of an AMD processor have the device file too.
has_amd_gpu() { [ -e "$kfd" ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Reads the version file alone: importing torch takes seconds.
has_rocm_torch() {
    "$1" -c '
import importlib.util, os, runpy, sys
spec = importlib.util.find_spec("torch")
folder = os.path.dirname(spec.origin) if spec and spec.origin else None
sys.exit(folder is None or runpy.run_path(os.path.join(folder, "version.py")).get("hip") is None)' 2>/dev/null
}

# Prints where PyTorch comes from: "pypi", "python" (the packages of $1) or the address of an index.
torch_source() {
    if [ -n "${TORCH_INDEX:-}" ]; then
        echo "$TORCH_INDEX"
    elif [ "${CPU:-}" = 1 ]; then
        echo pypi
    elif has_rocm_torch "$1"; then
        echo python
    elif has_amd_gpu; then
        fail "There is an AMD GPU ($kfd), but '$1' has no ROCm build of PyTorch, and PyPI's PyTorch cannot use it. Set" \
            "    PYTHON=/path/to/a/python that has one, as in AMD's containers," \
            "    TORCH_INDEX=the address of a package index of ROCm builds, or" \
            "    CPU=1 to run on the CPU."
    else
        echo pypi
    fi
}

new_venv() {
    local python=$1 source=$2 options=(--clear) folder
    [ "$source" != python ] || options+=(--system-site-packages)
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv "${options[@]}" .venv || fail "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv"
    [ "$source" = python ] || return 0
    # Where $python is itself of a venv, the system's packages are not the ones that it has.
    for folder in .venv/lib/python3*/site-packages; do
        "$python" -c 'import site; print("\n".join(site.getsitepackages()))' >"$folder/packages_of_python.pth"
    done
}

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" ||
        fail "Installation failed: pip's message above says why. To use a PyTorch you already have:" \
            "    pip install -e . && mhc-ops check"
}

install_project() {
    local source=$1 purpose=$2 extras=triton packages='^numpy=='
    if [ "$purpose" = test ]; then
        extras=test packages=.
    fi
    echo "Installing mhc_ops[$extras] into .venv (PyTorch is a large download; minutes, once)"
    if [ "$source" = pypi ]; then
        pip_install -c constraints.txt -e ".[$extras]"
        return
    fi
    # The triton that fits came with torch; PyPI's torch, triton and tilelang are made for CUDA.
    [ "$source" = python ] || pip_install --index-url "$source" torch
    # A tool that $PYTHON has in the same version would else not get its command in .venv.
    pip_install --ignore-installed "setuptools>=77" \
        -r <(grep -Ev '^(torch|triton|tilelang)==' constraints.txt | grep -E "$packages")
    pip_install --no-deps -e .
}

make_venv() {
    local purpose=$1 python=${PYTHON:-python3} source made wanted installed
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "mhc_ops needs Python 3.10 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3."
    source=$(torch_source "$python")
    made=$(echo "$("$python" --version) $source" | cksum)
    if [ "$(cat .venv/made 2>/dev/null)" != "$made" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        new_venv "$python" "$source"
        echo "$made" >.venv/made
    fi
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    installed=$(cat .venv/installed 2>/dev/null) || true
    if [ "$installed" != "$wanted $purpose" ] && [ "$installed" != "$wanted test" ]; then
        install_project "$source" "$purpose"
        echo "$wanted $purpose" >.venv/installed
    fi
    if [ "${CPU:-}" != 1 ] && has_amd_gpu &&
        ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        fail "There is an AMD GPU ($kfd), but the PyTorch in .venv sees no GPU. May this user open $kfd (groups render" \
            "and video)? Is it a ROCm build (python -c 'import torch; print(torch.version.hip)')? CPU=1 runs on the CPU."
    fi
    # shellcheck disable=SC1091
    . .venv/bin/activate
}
