package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	serviceRange   = "10.96.0.0/16"
	firstService   = "10.96.0.1"
	bootstrapGroup = "system:bootstrappers:coracle:joining-nodes"
	// For an emulated machine that runs twenty pods beside all components; it only ends a start that hangs.
	patience = 600 * time.Second
)

// What nodes and joining nodes do, and nothing else: the others ask a hundred times as much.
const auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
"omitManagedFields": true, "rules": [
{"level": "Request", "userGroups": ["system:nodes", "system:bootstrappers"]},
{"level": "None"}]}
`

// The controllers that a node meets; an own list is quicker to start than all of them.
var controllers = []string{
	"serviceaccount-controller", "serviceaccount-token-controller", "root-ca-certificate-publisher-controller",
	"bootstrap-signer-controller", "token-cleaner-controller",
	"certificatesigningrequest-approving-controller", "certificatesigningrequest-signing-controller",
	"certificatesigningrequest-cleaner-controller",
	"namespace-controller", "node-lifecycle-controller", "taint-eviction-controller", "ttl-controller",
	"pod-garbage-collector-controller", "garbage-collector-controller", "ttl-after-finished-controller",
	"job-controller", "cronjob-controller", "daemonset-controller", "replicaset-controller",
	"deployment-controller", "statefulset-controller", "disruption-controller",
	"endpoints-controller", "endpointslice-controller", "resourceclaim-controller",
	"persistentvolume-binder-controller", "persistentvolumeclaim-protection-controller",
	"ephemeral-volume-controller",
}

type cluster struct {
	dir, server, etcd string
	chosen            settings
	token             [2]string
	components        []*component
	// As the administrator, and as the API server towards etcd.
	admin, store *http.Client
}

// NewCluster lays out the directory; nothing runs yet.
func newCluster(dir string, chosen settings) (*cluster, error) {
	program, err := siblingProgram("controlplane")
	if err != nil {
		return nil, err
	}
	for _, sub := range []string{"pki", "logs", "nodes", "etcd"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, err
		}
	}
	c := &cluster{dir: dir, chosen: chosen}
	c.server = "https://" + net.JoinHostPort(chosen.address, strconv.Itoa(chosen.port))
	c.etcd = "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(chosen.port+1))
	c.token = [2]string{word(6), word(16)}
	if err := c.writeFiles(); err != nil {
		return nil, err
	}
	c.add(program, "etcd", c.etcdFlags())
	c.add(program, "kube-apiserver", c.serverFlags())
	if chosen.controllers {
		c.add(program, "kube-controller-manager", c.controllerFlags())
	}
	if chosen.scheduler {
		c.add(program, "kube-scheduler", []string{
			"--kubeconfig=" + c.path("kube-scheduler.kubeconfig"), "--leader-elect=false", "--secure-port=0",
		})
	}
	for name := range chosen.flags {
		if _, err := c.component(name); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *cluster) add(program, name string, flags []string) {
	c.components = append(c.components, &component{
		name: name, program: program, log: c.path("logs/" + name + ".log"),
		args: append(flags, c.chosen.flags[name]...),
	})
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) component(name string) (*component, error) {
	for _, member := range c.components {
		if member.name == name {
			return member, nil
		}
	}
	return nil, fmt.Errorf("there is no %q here", name)
}

// WriteFiles makes keys, certificates, kubeconfigs and the audit policy.
func (c *cluster) writeFiles() error {
	pki := c.path("pki")
	ca, err := newAuthority(pki, "ca", "test-cluster")
	if err != nil {
		return err
	}
	store, err := newAuthority(pki, "etcd-ca", "test-etcd")
	if err != nil {
		return err
	}
	front, err := newAuthority(pki, "front-proxy-ca", "test-front-proxy")
	if err != nil {
		return err
	}
	hosts := []string{
		c.chosen.address, "127.0.0.1", "localhost", firstService,
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
	}
	for _, wanted := range []struct {
		by      *authority
		file    string
		subject pkix.Name
		hosts   []string
	}{
		{ca, "apiserver", pkix.Name{CommonName: "kube-apiserver"}, hosts},
		{ca, "kubelet-client", pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}}, nil},
		{front, "front-proxy-client", pkix.Name{CommonName: "front-proxy-client"}, nil},
		{store, "etcd", pkix.Name{CommonName: "etcd"}, []string{"127.0.0.1", "localhost"}},
		{store, "etcd-client", pkix.Name{CommonName: "kube-apiserver"}, nil},
	} {
		made, err := wanted.by.issue(wanted.subject, wanted.hosts, lifetime)
		if err != nil {
			return err
		}
		if err := made.write(pki, wanted.file); err != nil {
			return err
		}
	}
	if err := writeServiceAccountKey(pki); err != nil {
		return err
	}
	admin, err := ca.issue(pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}, nil, lifetime)
	if err != nil {
		return err
	}
	if err := writeKubeconfig(c.path("admin.kubeconfig"), c.server, ca.pem, admin.user()); err != nil {
		return err
	}
	for _, name := range []string{"kube-controller-manager", "kube-scheduler"} {
		issued, err := ca.issue(pkix.Name{CommonName: "system:" + name}, nil, lifetime)
		if err != nil {
			return err
		}
		if err := writeKubeconfig(c.path(name+".kubeconfig"), c.server, ca.pem, issued.user()); err != nil {
			return err
		}
	}
	token := map[string]string{"token": c.token[0] + "." + c.token[1]}
	if err := writeKubeconfig(c.path("bootstrap.kubeconfig"), c.server, ca.pem, token); err != nil {
		return err
	}
	for name, text := range map[string]string{"audit-policy.yaml": auditPolicy, "server": c.server + "\n"} {
		if err := os.WriteFile(c.path(name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	if c.admin, err = client(ca, admin); err != nil {
		return err
	}
	api, err := store.issue(pkix.Name{CommonName: "cluster"}, nil, lifetime)
	if err != nil {
		return err
	}
	c.store, err = client(store, api)
	return err
}

func (c *cluster) etcdFlags() []string {
	peer := "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(c.chosen.port+2))
	authority, cert, key := c.path("pki/etcd-ca.crt"), c.path("pki/etcd.crt"), c.path("pki/etcd.key")
	return []string{
		"--name=test", "--data-dir=" + c.path("etcd"),
		"--listen-client-urls=" + c.etcd, "--advertise-client-urls=" + c.etcd,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=test=" + peer,
		"--client-cert-auth", "--trusted-ca-file=" + authority, "--cert-file=" + cert, "--key-file=" + key,
		"--peer-client-cert-auth", "--peer-trusted-ca-file=" + authority,
		"--peer-cert-file=" + cert, "--peer-key-file=" + key,
		// This data is not needed after a power failure.
		"--unsafe-no-fsync", "--log-level=warn",
	}
}

func (c *cluster) serverFlags() []string {
	pki := func(name string) string { return c.path("pki/" + name) }
	// Only an address that pods can reach is worth a place in the list of endpoints.
	endpoints := "none"
	if ip := net.ParseIP(c.chosen.address); ip != nil && !ip.IsLoopback() {
		endpoints = "lease"
	}
	return []string{
		"--bind-address=" + c.chosen.address, "--advertise-address=" + c.chosen.address,
		"--secure-port=" + strconv.Itoa(c.chosen.port), "--endpoint-reconciler-type=" + endpoints,
		"--etcd-servers=" + c.etcd, "--etcd-cafile=" + pki("etcd-ca.crt"),
		"--etcd-certfile=" + pki("etcd-client.crt"), "--etcd-keyfile=" + pki("etcd-client.key"),
		"--tls-cert-file=" + pki("apiserver.crt"), "--tls-private-key-file=" + pki("apiserver.key"),
		"--client-ca-file=" + pki("ca.crt"), "--enable-bootstrap-token-auth",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + pki("sa.pub"), "--service-account-signing-key-file=" + pki("sa.key"),
		"--service-cluster-ip-range=" + serviceRange, "--allow-privileged",
		"--kubelet-client-certificate=" + pki("kubelet-client.crt"), "--kubelet-client-key=" + pki("kubelet-client.key"),
		"--kubelet-preferred-address-types=InternalIP",
		// For API servers behind this one, such as the metrics-server.
		"--proxy-client-cert-file=" + pki("front-proxy-client.crt"), "--proxy-client-key-file=" + pki("front-proxy-client.key"),
		"--requestheader-client-ca-file=" + pki("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--audit-policy-file=" + c.path("audit-policy.yaml"), "--audit-log-path=" + c.path("audit.log"),
	}
}

func (c *cluster) controllerFlags() []string {
	pki := func(name string) string { return c.path("pki/" + name) }
	return []string{
		"--kubeconfig=" + c.path("kube-controller-manager.kubeconfig"),
		"--leader-elect=false", "--secure-port=0", "--use-service-account-credentials",
		"--controllers=" + strings.Join(controllers, ","),
		"--service-account-private-key-file=" + pki("sa.key"), "--root-ca-file=" + pki("ca.crt"),
		"--cluster-signing-cert-file=" + pki("ca.crt"), "--cluster-signing-key-file=" + pki("ca.key"),
		"--kube-api-qps=200", "--kube-api-burst=400",
	}
}

// Begin starts everything in order and returns once a node can join.
func (c *cluster) begin(until context.Context) error {
	// One after the other: the API server would wait for etcd by itself, but looks less and
	// less often, and the others give up after a while without an API server.
	for _, member := range c.components[:2] {
		if err := member.start(); err != nil {
			return err
		}
		if err := c.waitReady(until, member); err != nil {
			return err
		}
	}
	for _, member := range c.components[2:] {
		if err := member.start(); err != nil {
			return err
		}
	}
	if err := c.createObjects(until); err != nil {
		return err
	}
	for _, member := range c.components[2:] {
		if err := c.waitReady(until, member); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) end() {
	for index := len(c.components) - 1; index >= 0; index-- {
		c.components[index].stop()
	}
}

// WaitReady waits until a component does its work.
func (c *cluster) waitReady(until context.Context, member *component) error {
	var look func() error
	switch member.name {
	case "etcd":
		look = func() error { return probe(c.store, c.etcd+"/health") }
	case "kube-apiserver":
		look = func() error { return probe(c.admin, c.server+"/readyz") }
	case "kube-controller-manager":
		// What it does first of all that others can see.
		look = func() error {
			return probe(c.admin, c.server+"/api/v1/namespaces/default/serviceaccounts/default")
		}
	default:
		return nil
	}
	return poll(until, member.name+" to be ready", func() error {
		if !member.running() {
			return fatal{fmt.Errorf("%s has ended: %s", member.name, member.logTail())}
		}
		return look()
	})
}

// Fatal is an error after which waiting is no use.
type fatal struct{ error }

// Poll tries until there is no error, for a bounded time.
func poll(until context.Context, what string, try func() error) error {
	deadline := time.Now().Add(patience)
	for {
		err := try()
		var last fatal
		if err == nil || errors.As(err, &last) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("timed out after %v waiting for %s: %w", patience, what, err)
		}
		select {
		case <-until.Done():
			return errors.New("told to end")
		case <-time.After(40 * time.Millisecond):
		}
	}
}

func client(ca *authority, own leaf) (*http.Client, error) {
	pair, err := tls.X509KeyPair(own.certificate, own.key)
	if err != nil {
		return nil, err
	}
	trusted := x509.NewCertPool()
	trusted.AddCert(ca.certificate)
	return &http.Client{
		Timeout: 15 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: trusted, Certificates: []tls.Certificate{pair}},
			// Each look is a connection of its own: those of before an outage are no use.
			DisableKeepAlives: true,
		},
	}, nil
}

func probe(by *http.Client, url string) error {
	response, err := by.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s: %s", url, response.Status, text)
	}
	return nil
}

func post(by *http.Client, url string, body any) (int, []byte, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	response, err := by.Post(url, "application/json", bytes.NewReader(text))
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	return response.StatusCode, content, err
}

// Furnish creates what an installer would: the token for joining and the rights that come with
// it; without controllers also what they would put into the default namespace.
func (c *cluster) createObjects(until context.Context) error {
	type object = map[string]any
	binding := func(name, role, group string) object {
		return object{
			"metadata": object{"name": name},
			"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
			"subjects": []any{object{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}},
		}
	}
	const bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
	const approval = "system:certificates.k8s.io:certificatesigningrequests:"
	wanted := []struct {
		path string
		body object
	}{
		{"/api/v1/namespaces/kube-system/secrets", object{
			"metadata": object{"name": "bootstrap-token-" + c.token[0]},
			"type":     "bootstrap.kubernetes.io/token",
			"stringData": object{
				"token-id": c.token[0], "token-secret": c.token[1],
				"usage-bootstrap-authentication": "true", "auth-extra-groups": bootstrapGroup,
			},
		}},
		{bindings, binding("joining-nodes", "system:node-bootstrapper", bootstrapGroup)},
		{bindings, binding("joining-nodes-approval", approval+"nodeclient", bootstrapGroup)},
		{bindings, binding("nodes-renewal-approval", approval+"selfnodeclient", "system:nodes")},
	}
	if !c.chosen.controllers {
		authorities, err := os.ReadFile(c.path("pki/ca.crt"))
		if err != nil {
			return err
		}
		for _, created := range []struct {
			path string
			body object
		}{
			{"serviceaccounts", object{"metadata": object{"name": "default"}}},
			{"configmaps", object{
				"metadata": object{"name": "kube-root-ca.crt"}, "data": object{"ca.crt": string(authorities)},
			}},
		} {
			created.path = "/api/v1/namespaces/default/" + created.path
			wanted = append(wanted, created)
		}
	}
	for _, created := range wanted {
		// The namespaces come a moment after the server is ready.
		if err := poll(until, "POST "+created.path, func() error {
			code, reply, err := post(c.admin, c.server+created.path, created.body)
			if err == nil && code != http.StatusCreated && code != http.StatusConflict {
				err = fmt.Errorf("POST %s: %d %s", created.path, code, reply)
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// Compact makes etcd forget every revision but the newest, through its JSON gateway.
func (c *cluster) compact() error {
	ask := func(path string, body any, into any) error {
		code, reply, err := post(c.store, c.etcd+path, body)
		if err != nil {
			return err
		}
		if code != http.StatusOK {
			return fmt.Errorf("etcd answers %d: %s", code, reply)
		}
		return json.Unmarshal(reply, into)
	}
	var range_ struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	key := base64.StdEncoding.EncodeToString([]byte("nothing"))
	if err := ask("/v3/kv/range", map[string]any{"key": key}, &range_); err != nil {
		return err
	}
	var done struct{}
	return ask("/v3/kv/compaction", map[string]any{"revision": range_.Header.Revision, "physical": true}, &done)
}

// Word is random, of lower-case letters and digits.
func word(length int) string {
	const letters = "abcdefghijklmnopqrstuvwxyz234567"
	bytes := make([]byte, length)
	_, _ = rand.Read(bytes)
	for index, value := range bytes {
		bytes[index] = letters[value%32]
	}
	return string(bytes)
}
