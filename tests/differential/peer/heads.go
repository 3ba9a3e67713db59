package main

import (
	"bytes"
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

// How a server reads a head; OK is false where it refuses it.
type head struct {
	OK      bool                `json:"ok"`
	Method  string              `json:"method"`
	Path    []byte              `json:"path"`
	Query   string              `json:"query"`
	Params  []param             `json:"params"`
	Host    string              `json:"host"`
	Length  int64               `json:"length"`
	Chunked bool                `json:"chunked"`
	Close   bool                `json:"close"`
	Is11    bool                `json:"is_1_1"`
	Headers map[string][][]byte `json:"headers"`
}

type param struct {
	Name   []byte   `json:"name"`
	Values [][]byte `json:"values"`
}

// A server of net/http whose connections are in memory.
type heads struct {
	connections chan net.Conn
}

func newHeads() *heads {
	all := &heads{connections: make(chan net.Conn)}
	server := http.Server{
		Handler:     http.HandlerFunc(note),
		ErrorLog:    log.New(io.Discard, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, key{}, c) },
	}
	go func() { fail(server.Serve(all)) }()
	return all
}

func (all *heads) Accept() (net.Conn, error) { return <-all.connections, nil }
func (all *heads) Close() error              { return nil }
func (all *heads) Addr() net.Addr            { return &net.TCPAddr{} }

// One answer for one head: what the handler saw, or none when the connection ends before.
func (all *heads) read(request question) any {
	conn := &connection{in: bytes.NewReader(request.Data), seen: make(chan head, 2)}
	all.connections <- conn
	return <-conn.seen
}

type key struct{}

func note(_ http.ResponseWriter, r *http.Request) {
	seen := head{
		OK:      true,
		Method:  r.Method,
		Path:    []byte(r.URL.Path),
		Query:   r.URL.RawQuery,
		Host:    r.Host,
		Length:  r.ContentLength,
		Chunked: len(r.TransferEncoding) == 1 && r.TransferEncoding[0] == "chunked",
		Close:   r.Close,
		Is11:    r.ProtoAtLeast(1, 1),
		Headers: map[string][][]byte{},
	}
	for name, values := range r.URL.Query() {
		parameter := param{Name: []byte(name)}
		for _, value := range values {
			parameter.Values = append(parameter.Values, []byte(value))
		}
		seen.Params = append(seen.Params, parameter)
	}
	for name, values := range r.Header {
		for _, value := range values {
			seen.Headers[name] = append(seen.Headers[name], []byte(value))
		}
	}
	r.Context().Value(key{}).(*connection).deliver(seen)
}

// A connection that brings some bytes and then ends. What is written to it is dropped.
type connection struct {
	in   *bytes.Reader
	once sync.Once
	seen chan head
}

func (c *connection) deliver(seen head) { c.once.Do(func() { c.seen <- seen }) }

func (c *connection) Read(into []byte) (int, error)    { return c.in.Read(into) }
func (c *connection) Write(bytes []byte) (int, error)  { return len(bytes), nil }
func (c *connection) Close() error                     { c.deliver(head{}); return nil }
func (c *connection) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *connection) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *connection) SetDeadline(time.Time) error      { return nil }
func (c *connection) SetReadDeadline(time.Time) error  { return nil }
func (c *connection) SetWriteDeadline(time.Time) error { return nil }
