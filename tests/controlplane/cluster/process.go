package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
)

// A component is one program of the control plane. All calls come from the main thread.
type component struct {
	name, program, log string
	args               []string
	command            *exec.Cmd
	// Closed when the process has ended and is reaped.
	done  chan struct{}
	ended atomic.Bool
}

func (p *component) running() bool { return p.command != nil && !p.ended.Load() }

func (p *component) start() error {
	if p.running() {
		return fmt.Errorf("%s runs already", p.name)
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p.command = exec.Command(p.program, append([]string{p.name}, p.args...)...)
	p.command.Stdout, p.command.Stderr = log, log
	// A group of its own: an interrupt from the terminal is for this program alone.
	p.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := p.command.Start(); err != nil {
		p.command = nil
		return fmt.Errorf("%s does not start: %w", p.name, err)
	}
	p.ended.Store(false)
	p.done = make(chan struct{})
	go func(command *exec.Cmd, done chan struct{}) {
		_ = command.Wait()
		p.ended.Store(true)
		close(done)
	}(p.command, p.done)
	return nil
}

// Stop ends the process at once and waits until it is gone. A frozen one too.
func (p *component) stop() {
	if p.command == nil {
		return
	}
	_ = p.command.Process.Kill()
	<-p.done
	p.command = nil
}

func (p *component) signal(which syscall.Signal) error {
	if !p.running() {
		return fmt.Errorf("%s does not run", p.name)
	}
	return p.command.Process.Signal(which)
}

func (p *component) pid() (int, error) {
	if !p.running() {
		return 0, fmt.Errorf("%s does not run", p.name)
	}
	return p.command.Process.Pid, nil
}

// LastWords is the end of the log, for the message of an error.
func (p *component) logTail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-8):], []byte(" | ")))
}

// FreePorts gives the first of several neighboring free ports. They lie below the range from
// which the kernel takes ports for outgoing connections, so that they are free again after a
// restart too.
func freePorts(address string, count int) (int, error) {
	for range 200 {
		first := 12000 + rand.IntN(8000)
		if allFree(address, first, count) {
			return first, nil
		}
	}
	return 0, errors.New("no free ports between 12000 and 20000")
}

func allFree(address string, first, count int) bool {
	for port := first; port < first+count; port++ {
		listener, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(port)))
		if err != nil {
			return false
		}
		listener.Close()
	}
	return true
}

func siblingProgram(name string) (string, error) {
	own, err := os.Executable()
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(own), name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%s has to stand beside %s: %w", name, own, err)
	}
	return path, nil
}
