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
	handlers["kubeconfig"] = func(text json.RawMessage) (any, error) {
		var request struct {
			File string `json:"file"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		response, err := kubeconfig(request.File)
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		return response, nil
	}
}

func kubeconfig(file string) (map[string]any, error) {
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: file}, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, err
	}
	response := map[string]any{"user": config.Username, "as": config.Impersonate.UserName, "provider": config.AuthProvider != nil}
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
	response["scheme"], response["host"], response["port"] = server.Scheme, server.Hostname(), server.Port()
	server.Path, server.RawPath = path.Join("/", server.Path), ""
	response["path"] = server.EscapedPath()
	response["ca"], response["certificate"], response["key"] = config.CAData, config.CertData, config.KeyData
	response["insecure"], response["name"] = config.Insecure, config.ServerName
	if config.Proxy != nil {
		proxy, err := config.Proxy(&http.Request{})
		if err != nil {
			return nil, err
		}
		response["proxy"] = proxy.String()
	}
	if config.ExecProvider != nil {
		response["program"] = config.ExecProvider.Command
		if config.BearerToken == "" && config.BearerTokenFile == "" {
			return response, nil
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
	response["sent"] = sent
	return response, nil
}

type sender func(*http.Request) (*http.Response, error)

func (send sender) RoundTrip(r *http.Request) (*http.Response, error) { return send(r) }
