"""Opens the link of coracle ui, and forwards connections from a free port of loopback to it, with the cookie
of the session in each request.

    with_session.py LINK

Prints its port. It ends with a signal.
"""

import http.client
import socket
import socketserver
import sys
import urllib.parse

HEAD_BYTES = 64 * 1024


def log_in(link):
    connection = http.client.HTTPConnection(link.hostname, link.port, timeout=60)
    connection.request("GET", f"{link.path}?{link.query}")
    return connection.getresponse().getheader("Set-Cookie").split(";")[0].encode()


LINK = urllib.parse.urlsplit(sys.argv[1])
ADDRESS, COOKIE = (LINK.hostname, LINK.port), log_in(LINK)


class Forward(socketserver.BaseRequestHandler):
    def handle(self):
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES:
            part = self.request.recv(4096)
            if not part:
                return
            head += part
        line, _, rest = head.partition(b"\r\n")
        with socket.create_connection(ADDRESS) as pages:
            pages.sendall(line + b"\r\nCookie: " + COOKIE + b"\r\n" + rest)
            # Each connection has one response, which ends with it.
            while part := pages.recv(64 * 1024):
                try:
                    self.request.sendall(part)
                except OSError:
                    return


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


with Server(("127.0.0.1", 0), Forward) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
