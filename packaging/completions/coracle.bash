# bash completion of coracle. Generated from the tables of the sources by UPDATE_DOCS=1 cargo test --lib pages. Do not edit.
# shellcheck shell=bash
_coracle_names() { # pods | containers
    local word before='' words=() agent=()
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        [ "$word" != = ] || continue
        case $before in
        -n | --namespace | --local-socket) agent+=("$before" "$word") before='' ;;
        -o | --output | -c | --container | --tail | --since | --image | --target | --address | --root-dir | --config | --images-dir | --runtime | --containerd-config | --certs-dir | --registries-dir | --registry | --image-registry | --image-mirror-file | --listen | --tls-cert | --tls-key | --token | --token-file | --discovery-token-ca-cert-hash | --discovery-file | --tls-bootstrap-token | --k0s-token | --bootstrap-kubeconfig | --write-bundle | --from-bundle | --node-name | --node-ip | --node-labels | --cri-socket | --kubernetes-dir | --ignore-preflight-errors | --timeout | --kubeconfig) before='' ;;
        *)
            before=$word
            case $word in -*) ;; *) words+=("$word") ;; esac
            ;;
        esac
    done
    case $1 in
    pods) coracle pods "${agent[@]}" 2>/dev/null | awk 'NR > 1 && $2 ~ /^[a-z0-9.-]+$/ { print $2 }' ;;
    containers)
        [ -n "${words[1]-}" ] || return
        coracle describe "${words[1]}" "${agent[@]}" 2>/dev/null |
            awk '/^[^ ]/ { names = /Containers:/ } names && /^  [^ ]/ { sub(":.*", ""); if ($1 ~ /^[a-z0-9-]+$/) print $1 }'
        ;;
    esac
}
_coracle() {
    local current=$2 before=$3 command='' word
    COMPREPLY=()
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in
        pods | describe | logs | debug | exec | attach | port-forward | status | events | top | images | volumes | devices | offline | setup | join | leave | check | validate | ui | version) command=$word && break ;;
        esac
    done
    case $before in
    -o | --output) mapfile -t COMPREPLY < <(compgen -W 'json yaml wide' -- "$current") && return ;;
    -c | --container) mapfile -t COMPREPLY < <(compgen -W "$(_coracle_names containers)" -- "$current") && return ;;
    --target) mapfile -t COMPREPLY < <(compgen -W "$(_coracle_names containers)" -- "$current") && return ;;
    --runtime) mapfile -t COMPREPLY < <(compgen -W 'containerd crio' -- "$current") && return ;;
    --boot-id-file | --bootstrap-kubeconfig | --cert-dir | --client-ca-file | --config | --config-dir | --experimental-mounter-path | --image-credential-provider-bin-dir | --image-credential-provider-config | --kubeconfig | --lock-file | --machine-id-file | --pod-manifest-path | --root-dir | --tls-cert-file | --tls-private-key-file | --volume-plugin-dir | --image-mirror-file | --local-objects | --local-socket | --offline-key | --images-dir | --containerd-config | --certs-dir | --registries-dir | --tls-cert | --tls-key | --token-file | --discovery-file | --k0s-token | --write-bundle | --from-bundle | --cri-socket | --kubernetes-dir)
        mapfile -t COMPREPLY < <(compgen -f -- "$current") && return
        ;;
    esac
    case $command:$current in
    pods:-*) mapfile -t COMPREPLY < <(compgen -W '--output --watch --namespace --all-namespaces --local-socket --help' -- "$current") ;;
    describe:-*) mapfile -t COMPREPLY < <(compgen -W '--namespace --local-socket --help' -- "$current") ;;
    logs:-*) mapfile -t COMPREPLY < <(compgen -W '--namespace --container --follow --previous --tail --since --timestamps --local-socket --help' -- "$current") ;;
    debug:-*) mapfile -t COMPREPLY < <(compgen -W '--namespace --image --target --container --stdin --tty --local-socket --help' -- "$current") ;;
    exec:-*) mapfile -t COMPREPLY < <(compgen -W '--namespace --container --stdin --tty --local-socket --help' -- "$current") ;;
    attach:-*) mapfile -t COMPREPLY < <(compgen -W '--namespace --container --stdin --tty --local-socket --help' -- "$current") ;;
    port-forward:-*) mapfile -t COMPREPLY < <(compgen -W '--namespace --address --local-socket --help' -- "$current") ;;
    status:-*) mapfile -t COMPREPLY < <(compgen -W '--output --local-socket --help' -- "$current") ;;
    events:-*) mapfile -t COMPREPLY < <(compgen -W '--output --watch --namespace --all-namespaces --local-socket --help' -- "$current") ;;
    top:-*) mapfile -t COMPREPLY < <(compgen -W '--once --namespace --all-namespaces --output --local-socket --help' -- "$current") ;;
    images:-*) mapfile -t COMPREPLY < <(compgen -W '--output --images-dir --no-wait --digests --local-socket --help' -- "$current") ;;
    volumes:-*) mapfile -t COMPREPLY < <(compgen -W '--output --namespace --all-namespaces --local-socket --help' -- "$current") ;;
    devices:-*) mapfile -t COMPREPLY < <(compgen -W '--output --local-socket --help' -- "$current") ;;
    offline:-*) mapfile -t COMPREPLY < <(compgen -W '--output --namespace --damaged --all --yes --remove --local-socket --help' -- "$current") ;;
    setup:-*) mapfile -t COMPREPLY < <(compgen -W '--dry-run --runtime --containerd-config --certs-dir --registries-dir --registry --image-registry --image-mirror-file --root-dir --local-socket --help' -- "$current") ;;
    join:-*) mapfile -t COMPREPLY < <(compgen -W '--token --token-file --discovery-token-ca-cert-hash --discovery-token-unsafe-skip-ca-verification --discovery-file --tls-bootstrap-token --k0s-token --bootstrap-kubeconfig --node-name --node-ip --node-labels --cri-socket --config --root-dir --kubernetes-dir --ignore-preflight-errors --timeout --no-start --write-bundle --from-bundle --dry-run --local-socket --help' -- "$current") ;;
    leave:-*) mapfile -t COMPREPLY < <(compgen -W '--drain --kubeconfig --timeout --root-dir --kubernetes-dir --dry-run --local-socket --help' -- "$current") ;;
    check:-*) mapfile -t COMPREPLY < <(compgen -W '--output --root-dir --config --cis --local-socket --help' -- "$current") ;;
    validate:-*) mapfile -t COMPREPLY < <(compgen -W '--output --local-socket --help' -- "$current") ;;
    ui:-*) mapfile -t COMPREPLY < <(compgen -W '--listen --tls-cert --tls-key --insecure-listen --local-socket --help' -- "$current") ;;
    version:-*) mapfile -t COMPREPLY < <(compgen -W '--local-socket --help' -- "$current") ;;
    images:*) mapfile -t COMPREPLY < <(compgen -W 'list import rm export verify' -f -- "$current") ;;
    offline:*) mapfile -t COMPREPLY < <(compgen -W 'list check purge trust accept' -f -- "$current") ;;
    setup:*) mapfile -t COMPREPLY < <(compgen -W 'runtime' -- "$current") ;;
    describe:* | logs:* | debug:* | exec:* | attach:* | port-forward:* | events:*) mapfile -t COMPREPLY < <(compgen -W "$(_coracle_names pods)" -- "$current") ;;
    validate:*) mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    :-*) mapfile -t COMPREPLY < <(compgen -W '--address --allowed-unsafe-sysctls --anonymous-auth --application-metrics-count-limit --authentication-token-webhook --authentication-token-webhook-cache-ttl --authorization-mode --authorization-webhook-cache-authorized-ttl --authorization-webhook-cache-unauthorized-ttl --boot-id-file --bootstrap-kubeconfig --cert-dir --cgroup-driver --cgroup-root --cgroups-per-qos --client-ca-file --cloud-provider --cluster-dns --cluster-domain --config --config-dir --container-hints --container-log-max-files --container-log-max-size --container-runtime-endpoint --containerd --containerd-namespace --contention-profiling --cpu-cfs-quota --cpu-cfs-quota-period --cpu-manager-policy --cpu-manager-policy-options --cpu-manager-reconcile-period --enable-controller-attach-detach --enable-debugging-handlers --enable-load-reader --enable-server --enforce-node-allocatable --event-burst --event-qps --event-storage-age-limit --event-storage-event-limit --eviction-hard --eviction-max-pod-grace-period --eviction-minimum-reclaim --eviction-pressure-transition-period --eviction-soft --eviction-soft-grace-period --exit-on-lock-contention --experimental-allocatable-ignore-eviction --experimental-mounter-path --fail-cgroupv1 --fail-swap-on --feature-gates --file-check-frequency --global-housekeeping-interval --hairpin-mode --healthz-bind-address --healthz-port --help --hostname-override --housekeeping-interval --http-check-frequency --image-credential-provider-bin-dir --image-credential-provider-config --image-gc-high-threshold --image-gc-low-threshold --image-service-endpoint --kernel-memcg-notification --kube-api-burst --kube-api-content-type --kube-api-qps --kube-reserved --kube-reserved-cgroup --kubeconfig --kubelet-cgroups --local-storage-capacity-isolation --lock-file --log-cadvisor-usage --log-flush-frequency --log-json-info-buffer-size --log-json-split-stream --log-text-info-buffer-size --log-text-split-stream --logging-format --machine-id-file --make-iptables-util-chains --manifest-url --manifest-url-header --max-open-files --max-pods --maximum-dead-containers --maximum-dead-containers-per-container --memory-manager-policy --minimum-container-ttl-duration --minimum-image-ttl-duration --node-ip --node-labels --node-status-max-images --node-status-update-frequency --oom-score-adj --pod-cidr --pod-manifest-path --pod-max-pids --pods-per-core --port --protect-kernel-defaults --provider-id --qos-reserved --read-only-port --register-node --register-with-taints --registry-burst --registry-qps --reserved-cpus --reserved-memory --resolv-conf --root-dir --rotate-certificates --rotate-server-certificates --runonce --runtime-cgroups --runtime-request-timeout --seccomp-default --serialize-image-pulls --storage-driver-buffer-duration --storage-driver-db --storage-driver-host --storage-driver-password --storage-driver-secure --storage-driver-table --storage-driver-user --streaming-connection-idle-timeout --sync-frequency --system-cgroups --system-reserved --system-reserved-cgroup --tls-cert-file --tls-cipher-suites --tls-min-version --tls-private-key-file --topology-manager-policy --topology-manager-policy-options --topology-manager-scope -v --version --vmodule --volume-plugin-dir --volume-stats-agg-period --check-config --container-logs-quota --image-mirror-file --image-registry --images-dir --local-objects --local-socket --local-socket-any-namespace --offline --offline-accept-after --offline-key --offline-secrets --offline-stop-after --offline-wait --print-config --remove-damaged-images' -- "$current") ;;
    :*) mapfile -t COMPREPLY < <(compgen -W 'pods describe logs debug exec attach port-forward status events top images volumes devices offline setup join leave check validate ui version' -- "$current") ;;
    esac
}
complete -o filenames -F _coracle coracle
