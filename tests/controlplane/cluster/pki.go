package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Long enough for every test; a shorter life is for the tests that are about it.
const lifetime = 30 * 24 * time.Hour

// An authority signs what the components show each other.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

// A leaf is a certificate with its key, both in PEM.
type leaf struct{ certificate, key []byte }

func newAuthority(dir, file, name string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template, err := blank(pkix.Name{CommonName: name}, lifetime)
	if err != nil {
		return nil, err
	}
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	signed, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	encoded, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed})
	if err := (leaf{text, encoded}).write(dir, file); err != nil {
		return nil, err
	}
	return readAuthority(dir, file)
}

func readAuthority(dir, file string) (*authority, error) {
	text, err := os.ReadFile(filepath.Join(dir, file+".crt"))
	if err != nil {
		return nil, err
	}
	secret, err := os.ReadFile(filepath.Join(dir, file+".key"))
	if err != nil {
		return nil, err
	}
	shown, _ := pem.Decode(text)
	hidden, _ := pem.Decode(secret)
	if shown == nil || hidden == nil {
		return nil, fmt.Errorf("%s/%s: no PEM", dir, file)
	}
	certificate, err := x509.ParseCertificate(shown.Bytes)
	if err != nil {
		return nil, err
	}
	key, err := x509.ParseECPrivateKey(hidden.Bytes)
	if err != nil {
		return nil, err
	}
	return &authority{certificate, key, text}, nil
}

func blank(subject pkix.Name, ttl time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	// Clocks differ, in the tests on purpose. But a short life is as long as it was asked for: by
	// its length a node knows when to renew it.
	since := now.Add(-time.Hour)
	if ttl < time.Hour {
		since = now
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		NotBefore:    since,
		NotAfter:     now.Add(ttl),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}, nil
}

// Issue makes a certificate: of a server when it has addresses or names, of a client always.
func (a *authority) issue(subject pkix.Name, hosts []string, ttl time.Duration) (leaf, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return leaf{}, err
	}
	template, err := blank(subject, ttl)
	if err != nil {
		return leaf{}, err
	}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	if len(hosts) > 0 {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return leaf{}, err
	}
	encoded, err := encodeKey(key)
	return leaf{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}), encoded}, err
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func (l leaf) write(dir, file string) error {
	if err := os.WriteFile(filepath.Join(dir, file+".crt"), l.certificate, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, file+".key"), l.key, 0o600)
}

// WriteServiceAccountKey makes the pair that service account tokens are signed and checked with.
func writeServiceAccountKey(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	secret, err := encodeKey(key)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	public := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	if err := os.WriteFile(filepath.Join(dir, "sa.pub"), public, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "sa.key"), secret, 0o600)
}

// WriteKubeconfig writes how to reach the API server, and as whom. JSON is YAML.
func writeKubeconfig(path, server string, authorities []byte, user map[string]string) error {
	text, err := json.MarshalIndent(map[string]any{
		"apiVersion": "v1",
		"kind":       "Config",
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{
			"server":                     server,
			"certificate-authority-data": base64.StdEncoding.EncodeToString(authorities),
		}}},
		"users":           []any{map[string]any{"name": "user", "user": user}},
		"contexts":        []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": "user"}}},
		"current-context": "test",
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o600)
}

func (l leaf) user() map[string]string {
	return map[string]string{
		"client-certificate-data": base64.StdEncoding.EncodeToString(l.certificate),
		"client-key-data":         base64.StdEncoding.EncodeToString(l.key),
	}
}

// NodeKubeconfig makes a node's credentials: arguments are the node's name and options.
func nodeKubeconfig(dir string, args []string) (string, error) {
	if len(args) == 0 {
		return "", errors.New("usage: node NAME [server=URL] [ttl=DURATION]")
	}
	name, ttl, server := args[0], lifetime, ""
	for _, option := range args[1:] {
		key, value, _ := strings.Cut(option, "=")
		var err error
		switch key {
		case "server":
			server = value
		case "ttl":
			ttl, err = time.ParseDuration(value)
		default:
			err = fmt.Errorf("unknown option %q", option)
		}
		if err != nil {
			return "", err
		}
	}
	if server == "" {
		text, err := os.ReadFile(filepath.Join(dir, "server"))
		if err != nil {
			return "", err
		}
		server = strings.TrimSpace(string(text))
	}
	ca, err := readAuthority(filepath.Join(dir, "pki"), "ca")
	if err != nil {
		return "", err
	}
	issued, err := ca.issue(nodeSubject(name), nil, ttl)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "nodes", name+".kubeconfig")
	return path, writeKubeconfig(path, server, ca.pem, issued.user())
}

// NodeRequest makes what a joining node sends, for tests of the approval: the key is lost.
func nodeRequest(name string) (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	template := x509.CertificateRequest{Subject: nodeSubject(name)}
	der, err := x509.CreateCertificateRequest(rand.Reader, &template, key)
	if err != nil {
		return "", err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	return base64.StdEncoding.EncodeToString(text), nil
}

func nodeSubject(name string) pkix.Name {
	return pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}
}

// PodCertificate signs the PKCS #10 request of a pod. It returns what a signer writes into the status of a
// PodCertificateRequest, without the conditions.
func (c *cluster) podCertificate(request string) (string, error) {
	der, err := base64.StdEncoding.DecodeString(request)
	if err != nil {
		return "", err
	}
	wanted, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return "", err
	}
	ca, err := readAuthority(c.path("pki"), "ca")
	if err != nil {
		return "", err
	}
	template, err := blank(pkix.Name{CommonName: "pod"}, 2*time.Hour)
	if err != nil {
		return "", err
	}
	// A certificate has whole seconds, and the API server compares.
	template.NotBefore = time.Now().UTC().Truncate(time.Second)
	template.NotAfter = template.NotBefore.Add(2 * time.Hour)
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	signed, err := x509.CreateCertificate(rand.Reader, template, ca.certificate, wanted.PublicKey, ca.key)
	if err != nil {
		return "", err
	}
	moment := func(after time.Duration) string { return template.NotBefore.Add(after).Format(time.RFC3339) }
	status, err := json.Marshal(map[string]string{
		"notBefore": moment(0), "beginRefreshAt": moment(time.Hour), "notAfter": moment(2 * time.Hour),
		"certificateChain": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed})),
	})
	return string(status), err
}
