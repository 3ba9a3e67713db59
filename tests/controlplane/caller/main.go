// Calls the node API of a kubelet with the client library of Kubernetes, and prints a line of
// JSON for each call: what tests/bench/api measures with.
//
//	caller get     [--count N] [--pause DURATION] [--gzip] PATH
//	caller exec    [--count N] [--websocket] NAMESPACE/POD/CONTAINER COMMAND...
//	caller hold    [--count N] NAMESPACE/POD/CONTAINER COMMAND...   until its input ends
//	caller forward [--count N] [--path PATH] NAMESPACE/POD PORT
//
// --kubeconfig is whose certificate is shown, --port the node API's on this machine.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
)

// How long a stream may take to come about, and one that is held to end.
const limit = time.Minute

type caller struct {
	config    *rest.Config
	count     int
	pause     time.Duration
	gzip      bool
	websocket bool
	path      string
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "caller:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) < 2 {
		return errors.New("get, exec, hold or forward")
	}
	var c caller
	flags := flag.NewFlagSet(os.Args[1], flag.ContinueOnError)
	kubeconfig := flags.String("kubeconfig", "", "whose certificate is shown")
	port := flags.Int("port", 10250, "the port of the node API")
	flags.IntVar(&c.count, "count", 1, "how often")
	flags.DurationVar(&c.pause, "pause", 0, "before each call but the first")
	flags.BoolVar(&c.gzip, "gzip", false, "take compressed answers")
	flags.BoolVar(&c.websocket, "websocket", false, "instead of SPDY")
	flags.StringVar(&c.path, "path", "/", "what is asked for through the forwarded port")
	if err := flags.Parse(os.Args[2:]); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	config.Host = fmt.Sprintf("https://127.0.0.1:%d", *port)
	// What a node shows is its own.
	config.TLSClientConfig.CAData, config.TLSClientConfig.CAFile, config.TLSClientConfig.Insecure = nil, "", true
	c.config = config
	rest := flags.Args()
	switch {
	case os.Args[1] == "get" && len(rest) == 1:
		return c.get(rest[0])
	case os.Args[1] == "exec" && len(rest) >= 2:
		return c.exec(rest[0], rest[1:])
	case os.Args[1] == "hold" && len(rest) >= 2:
		return c.hold(rest[0], rest[1:])
	case os.Args[1] == "forward" && len(rest) == 2:
		return c.forward(rest[0], rest[1])
	}
	return errors.New("which of get, exec, hold, forward, and of what")
}

// Prints one call: how long it took and what came.
func report(begun time.Time, count int64) {
	line, _ := json.Marshal(map[string]any{"seconds": time.Since(begun).Seconds(), "bytes": count})
	fmt.Println(string(line))
}

func (c *caller) get(path string) error {
	c.config.DisableCompression = true
	client, err := rest.HTTPClientFor(c.config)
	if err != nil {
		return err
	}
	for number := range c.count {
		if number > 0 {
			time.Sleep(c.pause)
		}
		begun := time.Now()
		request, err := http.NewRequest(http.MethodGet, c.config.Host+path, nil)
		if err != nil {
			return err
		}
		if c.gzip {
			request.Header.Set("Accept-Encoding", "gzip")
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		count, err := io.Copy(io.Discard, response.Body)
		response.Body.Close()
		if err != nil {
			return err
		}
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", path, response.Status)
		}
		report(begun, count)
	}
	return nil
}

func (c *caller) executor(target string, command []string, input bool) (remotecommand.Executor, error) {
	address, err := url.Parse(c.config.Host + "/exec/" + target)
	if err != nil {
		return nil, err
	}
	query := url.Values{"command": command, "output": {"1"}, "error": {"1"}}
	if input {
		query.Set("input", "1")
	}
	address.RawQuery = query.Encode()
	if c.websocket {
		return remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, address.String())
	}
	return remotecommand.NewSPDYExecutor(c.config, http.MethodPost, address)
}

func (c *caller) exec(target string, command []string) error {
	for range c.count {
		begun := time.Now()
		executor, err := c.executor(target, command, false)
		if err != nil {
			return err
		}
		var out, complaint bytes.Buffer
		streams := remotecommand.StreamOptions{Stdout: &out, Stderr: &complaint}
		if err := executor.StreamWithContext(context.Background(), streams); err != nil {
			return fmt.Errorf("%w: %s", err, complaint.String())
		}
		report(begun, int64(out.Len()))
	}
	return nil
}

// Sends one line in and has it back, then is silent.
type held struct {
	line    io.Reader
	release <-chan struct{}
}

func (h *held) Read(into []byte) (int, error) {
	if count, err := h.line.Read(into); err == nil {
		return count, nil
	}
	<-h.release
	return 0, io.EOF
}

type echo struct {
	once sync.Once
	back chan<- error
}

func (e *echo) Write(bytes []byte) (int, error) {
	e.once.Do(func() { e.back <- nil })
	return len(bytes), nil
}

// Opens streams to a command that says what it hears, and keeps them.
func (c *caller) hold(target string, command []string) error {
	begun := time.Now()
	release := make(chan struct{})
	back, ended := make(chan error, c.count), make(chan error, c.count)
	for range c.count {
		executor, err := c.executor(target, command, true)
		if err != nil {
			return err
		}
		streams := remotecommand.StreamOptions{
			Stdin:  &held{line: bytes.NewBufferString("x\n"), release: release},
			Stdout: &echo{back: back},
			Stderr: io.Discard,
		}
		go func() { ended <- executor.StreamWithContext(context.Background(), streams) }()
		// One after the other: it is not the opening that is measured.
		select {
		case <-back:
		case err := <-ended:
			return fmt.Errorf("a stream ended: %w", err)
		case <-time.After(limit):
			return errors.New("a stream did not open")
		}
	}
	report(begun, int64(c.count))
	_, _ = io.Copy(io.Discard, os.Stdin)
	close(release)
	for range c.count {
		select {
		case err := <-ended:
			if err != nil {
				return err
			}
		case <-time.After(limit):
			return errors.New("a stream did not end")
		}
	}
	return nil
}

func fetch(connection net.Conn, path string) (int64, error) {
	fmt.Fprintf(connection, "GET %s HTTP/1.0\r\n\r\n", path)
	response, err := http.ReadResponse(bufio.NewReaderSize(connection, 64*1024), nil)
	if err != nil {
		return 0, err
	}
	if response.StatusCode != http.StatusOK || response.ContentLength < 0 {
		return 0, fmt.Errorf("%s: %s, length %d", path, response.Status, response.ContentLength)
	}
	return io.Copy(io.Discard, response.Body)
}

// Opens one forwarding, and fetches through it again and again.
func (c *caller) forward(target, port string) error {
	address, err := url.Parse(c.config.Host + "/portForward/" + target)
	if err != nil {
		return err
	}
	transport, upgrader, err := spdy.RoundTripperFor(c.config)
	if err != nil {
		return err
	}
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address)
	stop, ready := make(chan struct{}), make(chan struct{})
	forwarder, err := portforward.New(dialer, []string{"0:" + port}, stop, ready, io.Discard, os.Stderr)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- forwarder.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		return fmt.Errorf("no forwarding: %w", err)
	case <-time.After(limit):
		return errors.New("no forwarding in time")
	}
	defer close(stop)
	ports, err := forwarder.GetPorts()
	if err != nil {
		return err
	}
	for range c.count {
		begun := time.Now()
		connection, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0].Local))
		if err != nil {
			return err
		}
		count, err := fetch(connection, c.path)
		// The end of the stream takes a while, which is not part of the transfer.
		report(begun, count)
		connection.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
