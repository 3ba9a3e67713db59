package main

import (
	"encoding/json"
	"io"
	"net/http"
	"path"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
)

// The server and the credentials of a kubeconfig, as the kubelet loads it.
func init() {
	answers["kubeconfig"] = func(text json.RawMessage) (any, error) {
		var asked struct {
			File string `json:"file"`
		}
		if err := json.Unmarshal(text, &asked); err != nil {
			return nil, err
		}
		answer, err := kubeconfig(asked.File)
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		return answer, nil
	}
}

func kubeconfig(file string) (map[string]any, error) {
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: file}, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, err
	}
	answer := map[string]any{"user": config.Username, "as": config.Impersonate.UserName, "provider": config.AuthProvider != nil}
	// What the first client checks, but for the certificates.
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, err
	}
	if _, err := rest.TLSConfigFor(config); err != nil && strings.Contains(err.Error(), "insecure flag") {
		return nil, err
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, err
	}
	settings, err := config.TransportConfig()
	if err != nil {
		return nil, err
	}
	answer["scheme"], answer["host"], answer["port"] = server.Scheme, server.Hostname(), server.Port()
	server.Path, server.RawPath = path.Join("/", server.Path), ""
	answer["path"] = server.EscapedPath()
	answer["ca"], answer["certificate"], answer["key"] = config.CAData, config.CertData, config.KeyData
	answer["insecure"], answer["name"] = config.Insecure, config.ServerName
	if config.Proxy != nil {
		proxy, err := config.Proxy(&http.Request{})
		if err != nil {
			return nil, err
		}
		answer["proxy"] = proxy.String()
	}
	if config.ExecProvider != nil {
		answer["program"] = config.ExecProvider.Command
		if config.BearerToken == "" && config.BearerTokenFile == "" {
			return answer, nil
		}
		// A token is sent without the program.
		settings.WrapTransport = nil
	}
	sent := ""
	wrapped, err := transport.HTTPWrappersForConfig(settings, sender(func(r *http.Request) (*http.Response, error) {
		sent = r.Header.Get("Authorization")
		return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(""))}, nil
	}))
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequest("GET", "https://h/", nil)
	if err != nil {
		return nil, err
	}
	if _, err := wrapped.RoundTrip(request); err != nil {
		return nil, err
	}
	answer["sent"] = sent
	return answer, nil
}

type sender func(*http.Request) (*http.Response, error)

func (send sender) RoundTrip(r *http.Request) (*http.Response, error) { return send(r) }
