package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// How a probe's client reads an answer: the bytes that a server sends before it closes the connection.
func response(data []byte) map[string]any {
	transport := &http.Transport{
		DisableKeepAlives:  true,
		DisableCompression: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return &server{in: bytes.NewReader(data), written: make(chan struct{})}, nil
		},
	}
	request, err := http.NewRequest("GET", "http://pod/", nil)
	if err != nil {
		fail(err)
	}
	got, err := transport.RoundTrip(request)
	if err != nil {
		return map[string]any{"error": err.Error()}
	}
	defer got.Body.Close()
	headers := map[string][][]byte{}
	for name, values := range got.Header {
		for _, value := range values {
			headers[name] = append(headers[name], []byte(value))
		}
	}
	result := map[string]any{"ok": true, "status": got.StatusCode, "headers": headers}
	if got.StatusCode == http.StatusSwitchingProtocols {
		return result
	}
	body, err := io.ReadAll(got.Body)
	result["body"] = body
	if err != nil {
		result["error"] = err.Error()
	}
	return result
}

// A connection on which a server answers once it was asked.
type server struct {
	in      *bytes.Reader
	once    sync.Once
	written chan struct{}
}

func (s *server) Read(into []byte) (int, error) {
	<-s.written
	return s.in.Read(into)
}

func (s *server) Write(bytes []byte) (int, error) {
	s.once.Do(func() { close(s.written) })
	return len(bytes), nil
}

func (s *server) Close() error {
	s.once.Do(func() { close(s.written) })
	return nil
}

func (s *server) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (s *server) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (s *server) SetDeadline(time.Time) error      { return nil }
func (s *server) SetReadDeadline(time.Time) error  { return nil }
func (s *server) SetWriteDeadline(time.Time) error { return nil }
