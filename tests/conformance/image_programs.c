// Programs of the images that upstream's tests call and that a static busybox lacks. The name by which it is
// called selects one: nonewprivs, nmeter, curl, nc, ipcs, sh, bash. They do what the tests use, not more.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *busybox = "/bin/busybox";

// A file that gives its owner's rights prints whose rights it has.
static int nonewprivs(void) {
    printf("Effective uid: %d\n", (int)geteuid());
    return 0;
}

// "nmeter -d0 %3t": the time of day with milliseconds, in UTC.
static int nmeter(void) {
    struct timespec now;
    struct tm day;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &day);
    printf("%02d:%02d:%02d.%03ld\n", day.tm_hour, day.tm_min, day.tm_sec, now.tv_nsec / 1000000);
    return 0;
}

// "ipcs -m": a table of the shared memory, with the IDs in the second column.
static int ipcs(void) {
    char line[512];
    FILE *segments = fopen("/proc/sysvipc/shm", "r");
    while (segments && fgets(line, sizeof line, segments)) {
        fputs(line, stdout);
    }
    return segments ? 0 : 1;
}

// A connected socket to a numeric address, or to "localhost".
static int connected(int kind, const char *host, int port, int seconds) {
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((unsigned short)port)};
    struct timeval limit = {.tv_sec = seconds};
    int is_six = strchr(host, ':') != NULL;
    if (strcmp(host, "localhost") == 0) {
        host = "127.0.0.1";
    }
    if (inet_pton(is_six ? AF_INET6 : AF_INET, host, is_six ? (void *)&six.sin6_addr : (void *)&four.sin_addr) != 1) {
        return -1;
    }
    int fd = socket(is_six ? AF_INET6 : AF_INET, kind | SOCK_CLOEXEC, 0);
    // The limit of a connect is that of a send.
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    const struct sockaddr *address = is_six ? (void *)&six : (void *)&four;
    return connect(fd, address, is_six ? sizeof six : sizeof four) == 0 ? fd : -1;
}

// "curl [-i] [-o FILE] [-w %{http_code}] [--connect-timeout N] [--max-time N] URL" with plain HTTP.
static int curl(int count, char **arguments) {
    const char *url = NULL, *format = NULL;
    FILE *output = stdout;
    int with_header = 0, seconds = 15;
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : "";
        if (strcmp(name, "-i") == 0) {
            with_header = 1;
        } else if (strcmp(name, "-o") == 0) {
            output = fopen(value, "w");
            i++;
        } else if (strcmp(name, "-w") == 0) {
            format = value;
            i++;
        } else if (strcmp(name, "--connect-timeout") == 0) {
            i++;
        } else if (strcmp(name, "--max-time") == 0) {
            seconds = atoi(value);
            i++;
        } else if (name[0] != '-') {
            url = name;
        }
    }
    static char host[256], response[1 << 20];
    int port = 80;
    if (!url || !output || strncmp(url, "https:", 6) == 0) {
        return 3;
    }
    url += strncmp(url, "http://", 7) == 0 ? 7 : 0;
    size_t size = strcspn(url, "/");
    const char *path = url[size] ? url + size : "/";
    const char *end = url[0] == '[' ? strchr(url, ']') : NULL;
    const char *colon = memchr(end ? end : url, ':', size - (size_t)((end ? end : url) - url));
    size_t length = end ? (size_t)(end - url) - 1 : colon ? (size_t)(colon - url) : size;
    if (length >= sizeof host) {
        return 3;
    }
    memcpy(host, url + (end ? 1 : 0), length);
    if (colon) {
        port = atoi(colon + 1);
    }
    int fd = connected(SOCK_STREAM, host, port, seconds);
    if (fd < 0) {
        fprintf(stderr, "curl: (7) Failed to connect to %s port %d\n", host, port);
        return 7;
    }
    // A server does not split what it sends to a client of version 1.0.
    dprintf(fd, "GET %s HTTP/1.0\r\nHost: %.*s\r\nUser-Agent: curl\r\nAccept: */*\r\n\r\n", path, (int)size, url);
    size_t used = 0;
    ssize_t part;
    while (used < sizeof response - 1 && (part = read(fd, response + used, sizeof response - 1 - used)) > 0) {
        used += (size_t)part;
    }
    char *body = strstr(response, "\r\n\r\n");
    if (!body) {
        return 52;
    }
    body = with_header ? response : body + 4;
    fwrite(body, 1, used - (size_t)(body - response), output);
    if (format && strcmp(format, "%{http_code}") == 0) {
        fflush(output);
        printf("%.3s", response + strlen("HTTP/1.x "));
    }
    return 0;
}

// "nc -w N -u HOST PORT": a datagram from the standard input, and the datagram that comes back. Without -u
// busybox does it, where "images" has renamed it.
static int nc(int count, char **arguments) {
    int seconds = 1, datagrams = 0;
    const char *rest[2] = {NULL, NULL};
    for (int i = 1, found = 0; i < count; i++) {
        if (strcmp(arguments[i], "-w") == 0 && i + 1 < count) {
            seconds = atoi(arguments[++i]);
        } else if (strcmp(arguments[i], "-u") == 0) {
            datagrams = 1;
        } else if (arguments[i][0] != '-' && found < 2) {
            rest[found++] = arguments[i];
        }
    }
    if (!datagrams || !rest[1]) {
        arguments[0] = "nb";
        execv(busybox, arguments);
        return 127;
    }
    char buffer[65536];
    int fd = connected(SOCK_DGRAM, rest[0], atoi(rest[1]), seconds);
    ssize_t size = read(0, buffer, sizeof buffer);
    if (fd < 0 || size < 0 || write(fd, buffer, (size_t)size) < 0) {
        return 1;
    }
    size = read(fd, buffer, sizeof buffer);
    return size >= 0 && write(1, buffer, (size_t)size) == size ? 0 : 1;
}

// Debian's busybox drops variables whose names have a hyphen; upstream's prints them for "sh -c env".
static int sh(int count, char **arguments) {
    if (count == 3 && strcmp(arguments[1], "-c") == 0 && strcmp(arguments[2], "env") == 0) {
        arguments += 2;
    } else {
        // Its messages begin with this name.
        arguments[0] = "/bin/sh";
    }
    execv(busybox, arguments);
    return 127;
}

int main(int count, char **arguments) {
    const char *slash = strrchr(arguments[0], '/');
    const char *name = slash ? slash + 1 : arguments[0];
    if (strcmp(name, "nmeter") == 0) {
        return nmeter();
    }
    if (strcmp(name, "curl") == 0) {
        return curl(count, arguments);
    }
    if (strcmp(name, "nc") == 0) {
        return nc(count, arguments);
    }
    if (strcmp(name, "ipcs") == 0) {
        return ipcs();
    }
    if (strcmp(name, "sh") == 0 || strcmp(name, "bash") == 0) {
        return sh(count, arguments);
    }
    return nonewprivs();
}
