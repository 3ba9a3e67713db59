// Cluster runs a control plane for tests and for trying things out: etcd, the API server and,
// where they are wanted, the controller manager and the scheduler, with keys and certificates
// made for the occasion. Everything lies in one directory and listens on one address; when this
// program ends, in whatever way, the kernel ends what it started.
//
//	cluster run DIR [-controllers] [-scheduler] [-address IP] [-port N] [-daemon]
//	                [-flag COMPONENT=FLAG]...
//	cluster node DIR NAME [server=URL] [ttl=DURATION]
//
// The programs stand beside it: "controlplane" (all components under one roof).
//
// "run" prints "ready URL" once the API server is ready, the bootstrap token is known to it, and
// the controllers have made the first service account. Then it takes commands, a line each, and
// answers each with one line, "ok ..." or "error ...":
//
//	stop NAME       SIGKILL: connections are reset, later ones refused
//	start NAME      start it again, with the same flags; ok once it is ready
//	freeze NAME     SIGSTOP: connections stay open and nothing answers
//	thaw NAME       SIGCONT
//	pid NAME        the process
//	node NAME ...   as the command of the same name: the file name of a kubeconfig
//	request NAME    a node's request for a certificate, for a CertificateSigningRequest
//	sign REQUEST    the status of a signed PodCertificateRequest, for its PKCS #10 request
//	compact         etcd forgets its history, so that old watches are answered with 410
//
// NAME is etcd, kube-apiserver, kube-controller-manager or kube-scheduler. The end of its input
// or SIGTERM ends it; with -daemon only the signal does.
//
// DIR afterwards holds admin.kubeconfig, bootstrap.kubeconfig (with the token), nodes/ (a
// kubeconfig per node), audit.log (what nodes and joining nodes asked for, with bodies of
// requests but not of answers), pki/ and logs/.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

func init() {
	// Children end with the thread that started them: the main one, which lives longest.
	runtime.LockOSThread()
}

func main() {
	if err := work(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func work(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: cluster run DIR [FLAGS] | cluster node DIR NAME [server=URL] [ttl=DURATION]")
	}
	dir, err := filepath.Abs(args[1])
	if err != nil {
		return err
	}
	switch args[0] {
	case "run":
		return run(dir, args[2:])
	case "node":
		path, err := nodeKubeconfig(dir, args[2:])
		if err != nil {
			return err
		}
		fmt.Println(path)
		return nil
	}
	return fmt.Errorf("unknown command %q", args[0])
}

type settings struct {
	controllers, scheduler, daemon bool
	address                        string
	port                           int
	// By component.
	flags map[string][]string
}

func parse(args []string) (settings, error) {
	chosen := settings{flags: map[string][]string{}}
	set := flag.NewFlagSet("cluster run", flag.ContinueOnError)
	set.BoolVar(&chosen.controllers, "controllers", false, "run the controller manager")
	set.BoolVar(&chosen.scheduler, "scheduler", false, "run the scheduler")
	set.BoolVar(&chosen.daemon, "daemon", false, "take no commands; run until SIGTERM")
	set.StringVar(&chosen.address, "address", "127.0.0.1", "where the API server listens")
	set.IntVar(&chosen.port, "port", 0, "the API server's port; etcd takes the two above (0: free ones)")
	set.Func("flag", "COMPONENT=FLAG, a flag more for a component", func(text string) error {
		component, setting, found := strings.Cut(text, "=")
		if !found {
			return errors.New("want COMPONENT=FLAG")
		}
		chosen.flags[component] = append(chosen.flags[component], setting)
		return nil
	})
	if err := set.Parse(args); err != nil {
		return chosen, err
	}
	if set.NArg() > 0 {
		return chosen, fmt.Errorf("unexpected argument %q", set.Arg(0))
	}
	return chosen, nil
}

func run(dir string, args []string) error {
	chosen, err := parse(args)
	if err != nil {
		return err
	}
	if chosen.port == 0 {
		if chosen.port, err = freePorts(chosen.address, 3); err != nil {
			return err
		}
	}
	plane, err := newCluster(dir, chosen)
	if err != nil {
		return err
	}
	defer plane.end()

	until, end := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer end()
	lines := make(chan string)
	if !chosen.daemon {
		go func() {
			input := bufio.NewScanner(os.Stdin)
			for input.Scan() {
				lines <- input.Text()
			}
			// The parent process has ended.
			end()
		}()
	}
	if err := plane.begin(until); err != nil {
		return err
	}
	fmt.Println("ready", plane.server)
	for {
		select {
		case <-until.Done():
			return nil
		case line := <-lines:
			result, err := plane.execute(until, strings.Fields(line))
			if err != nil {
				fmt.Println("error", strings.ReplaceAll(err.Error(), "\n", " "))
				continue
			}
			fmt.Println(strings.TrimSpace("ok " + result))
		}
	}
}

func (c *cluster) execute(until context.Context, words []string) (string, error) {
	if len(words) == 0 {
		return "", errors.New("an empty command")
	}
	switch words[0] {
	case "compact":
		return "", c.compact()
	case "node":
		return nodeKubeconfig(c.dir, words[1:])
	}
	if len(words) != 2 {
		return "", fmt.Errorf("unknown command %q", strings.Join(words, " "))
	}
	switch words[0] {
	case "request":
		return nodeRequest(words[1])
	case "sign":
		return c.podCertificate(words[1])
	}
	component, err := c.component(words[1])
	if err != nil {
		return "", err
	}
	switch words[0] {
	case "stop":
		component.stop()
		return "", nil
	case "start":
		if err := component.start(); err != nil {
			return "", err
		}
		return "", c.waitReady(until, component)
	case "freeze":
		return "", component.signal(syscall.SIGSTOP)
	case "thaw":
		return "", component.signal(syscall.SIGCONT)
	case "pid":
		pid, err := component.pid()
		return fmt.Sprint(pid), err
	}
	return "", fmt.Errorf("unknown command %q", words[0])
}
