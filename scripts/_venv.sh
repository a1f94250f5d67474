# Sourced by the scripts next to it: the repository's own virtual environment, .venv.
#
#   ensure_venv EXTRA...    create it, and install the project with these extras, when needed
#
# What is installed is remembered per extra as the hash of everything that decides it, so a
# second run costs a hash. Standard output belongs to the caller: everything here writes to
# standard error.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"

fail() {
    echo "error: $*" >&2
    exit 1
}

# Run a command that ends with this script: without it, a pip whose script was terminated goes
# on installing by itself.
_run() {
    local child status=0
    "$@" >&2 &
    child=$!
    trap 'kill "$child" 2>/dev/null; wait "$child" || true; exit 130' INT TERM HUP
    wait "$child" || status=$?
    trap - INT TERM HUP
    return "$status"
}

_find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; ${PYTHON:-python3} is" \
        "$("${PYTHON:-python3}" --version 2>&1 || true). Name another with PYTHON=/path/to/python"
}

_create_venv() {
    local base
    # Also repairs an environment whose creation was interrupted before pip was in it.
    if "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    base="$(_find_python)"
    echo "creating $venv with $("$base" --version)" >&2
    _run "$base" -m venv "$venv" ||
        fail "$base cannot create a virtual environment (Debian and Ubuntu: apt install python3-venv)"
}

ensure_venv() {
    local extra key missing=()
    _create_venv
    key="$("$python" - "$root" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
facts = [str(root), sys.version, (root / "pyproject.toml").read_text()]
print(hashlib.sha256("\0".join(facts).encode()).hexdigest())
PY
)"
    for extra in "$@"; do
        if [ "$(cat "$venv/.installed-$extra" 2>/dev/null)" != "$key" ]; then
            missing+=("$extra")
        fi
    done
    if [ "${#missing[@]}" -eq 0 ]; then
        return
    fi
    local list
    list="$(IFS=,; echo "${missing[*]}")"
    echo "installing sgl-vertumnus[$list] into $venv" >&2
    case " ${missing[*]} " in
        *" worker "*) echo "(SGLang and PyTorch: about 11 GB and some minutes, once)" >&2 ;;
    esac
    _run "$python" -m pip install --disable-pip-version-check -e "$root[$list]" ||
        fail "pip could not install the project; the lines above say why"
    for extra in "${missing[@]}"; do
        echo "$key" >"$venv/.installed-$extra"
    done
}

# What the transfer engine links against, from Debian or Ubuntu: installed when this user may,
# named when not.
ensure_transfer_libraries() {
    local packages=(libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200)
    if [ -n "$(ldconfig -p | grep -F libibverbs.so.1)" ]; then
        return
    fi
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "the transfer engine needs: apt-get install ${packages[*]}" >&2
        return 1
    fi
    _apt_install "${packages[@]}"
}

# What the live page is looked at with, as above.
ensure_chromium() {
    if command -v chromium chromium-browser google-chrome >/dev/null; then
        return
    fi
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "the tests of the live page need: apt-get install chromium" >&2
        return 1
    fi
    _apt_install chromium
}

_apt_install() {
    echo "installing $*" >&2
    { apt-get install -y -q "$@" ||
        { apt-get update -q && apt-get install -y -q "$@"; }; } >&2
}
