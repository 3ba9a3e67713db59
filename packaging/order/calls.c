/* Runs a program and writes which of its functions are called in each window of five seconds.
 *
 *   calls OUTPUT ADDRESSES PROGRAM [ARGUMENT...]
 *
 * ADDRESSES is a file with one hexadecimal address per line: the entries of functions of a program
 * at a fixed address. Each line that is appended to OUTPUT is "PROCESS WINDOW ADDRESS". Each entry
 * gets a breakpoint instruction, which is removed at the first call, and set again in the next
 * window. So also functions whose pages the program has released are found again. At the end of a
 * window, functions to which a waiting thread will return count as called: the loops of threads are
 * entered once.
 * Signals for this process that end a program are passed on. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/time.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

/* Frames further out than STACK_BYTES belong to functions that only start a thread. */
enum { WINDOW_SECONDS = 5, STACK_BYTES = 4096, LARGEST_FUNCTION = 65536 };

static unsigned long *addresses;
static unsigned char *bytes, *seen;
static size_t count;
static pid_t program;
static volatile sig_atomic_t window_over;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int compare(const void *a, const void *b) {
    unsigned long x = *(const unsigned long *)a, y = *(const unsigned long *)b;
    return x < y ? -1 : x > y;
}

static void handle(int signal) {
    if (signal == SIGALRM)
        window_over = 1;
    else
        kill(program, signal);
}

static void read_addresses(const char *path) {
    FILE *list = fopen(path, "re");
    if (!list) fail(path);
    unsigned long address;
    size_t room = 0;
    while (fscanf(list, "%lx", &address) == 1) {
        if (count == room) {
            room = room * 2 + 1024;
            addresses = realloc(addresses, room * sizeof *addresses);
            if (!addresses) fail("memory");
        }
        addresses[count++] = address;
    }
    fclose(list);
    qsort(addresses, count, sizeof *addresses, compare);
    bytes = malloc(count + 1);
    seen = calloc(count + 1, 1);
    if (!bytes || !seen) fail("memory");
}

static int memory_of(pid_t pid) {
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/mem", (int)pid);
    return open(path, O_RDWR | O_CLOEXEC);
}

static void set_breakpoints(int memory) {
    const unsigned char breakpoint = 0xcc;
    for (size_t i = 0; i < count; i++) {
        seen[i] = 0;
        if (pwrite(memory, &breakpoint, 1, (off_t)addresses[i]) != 1) fail("breakpoint");
    }
}

/* The function that contains an address; count: none. */
static size_t function_of(unsigned long address) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (addresses[middle] <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low && address - addresses[low - 1] < LARGEST_FUNCTION ? low - 1 : count;
}

/* Whether the bytes before an address may be a call: of an address, or through a register or memory. */
static int follows_call(int memory, unsigned long address) {
    unsigned char code[7];
    if (pread(memory, code, sizeof code, (off_t)(address - sizeof code)) != sizeof code) return 0;
    return code[2] == 0xe8 || code[5] == 0xff || code[4] == 0xff || code[1] == 0xff || code[0] == 0xff;
}

/* Writes the functions to which waiting threads will return. */
static void write_waiting(int memory, FILE *out, unsigned long window) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/task", (int)program);
    DIR *threads = opendir(path);
    if (!threads) return;
    for (struct dirent *entry; (entry = readdir(threads));) {
        snprintf(path, sizeof path, "/proc/%d/task/%.10s/syscall", (int)program, entry->d_name);
        FILE *file = fopen(path, "re");
        if (!file) continue;
        /* "number six-arguments stack-pointer program-counter", or "running". */
        unsigned long pointer = 0, words[STACK_BYTES / sizeof(long)];
        if (fgets(line, sizeof line, file)) sscanf(line, "%*s %*s %*s %*s %*s %*s %*s %lx", &pointer);
        fclose(file);
        ssize_t got = pointer ? pread(memory, words, sizeof words, (off_t)pointer) : 0;
        for (size_t i = 0; got > 0 && i < (size_t)got / sizeof *words; i++) {
            size_t index = function_of(words[i]);
            if (index == count || seen[index] || !follows_call(memory, words[i])) continue;
            seen[index] = 1;
            fprintf(out, "%d %lu %lx\n", (int)program, window, addresses[index]);
        }
    }
    closedir(threads);
    fflush(out);
}

/* Whether the thread stopped at one of the breakpoints. A child process can have a copy of the
 * memory, so the instruction is restored in the memory of the thread itself. */
static int was_breakpoint(pid_t thread, FILE *out, unsigned long window) {
    struct user_regs_struct registers;
    if (ptrace(PTRACE_GETREGS, thread, 0, &registers) != 0) return 0;
    unsigned long address = registers.rip - 1;
    unsigned long *found = bsearch(&address, addresses, count, sizeof address, compare);
    if (!found) return 0;
    size_t index = (size_t)(found - addresses);
    int memory = memory_of(thread);
    if (memory < 0 || pwrite(memory, &bytes[index], 1, (off_t)address) != 1) fail("restore");
    close(memory);
    if (!seen[index]) {
        seen[index] = 1;
        fprintf(out, "%d %lu %lx\n", (int)program, window, address);
        fflush(out);
    }
    registers.rip = address;
    ptrace(PTRACE_SETREGS, thread, 0, &registers);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: calls OUTPUT ADDRESSES PROGRAM [ARGUMENT...]\n");
        return 2;
    }
    FILE *out = fopen(argv[1], "ae");
    if (!out) fail(argv[1]);
    read_addresses(argv[2]);
    program = fork();
    if (program < 0) fail("fork");
    if (program == 0) {
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        execv(argv[3], argv + 3);
        fail(argv[3]);
    }
    int status;
    if (waitpid(program, &status, 0) < 0 || !WIFSTOPPED(status)) fail("the program did not start");
    ptrace(PTRACE_SETOPTIONS, program, 0,
           PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL);
    int memory = memory_of(program);
    if (memory < 0) fail("memory of the program");
    for (size_t i = 0; i < count; i++)
        if (pread(memory, &bytes[i], 1, (off_t)addresses[i]) != 1) fail("memory of the program");
    set_breakpoints(memory);

    struct sigaction action = {.sa_handler = handle};
    const int handled[] = {SIGALRM, SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    for (size_t i = 0; i < sizeof handled / sizeof *handled; i++) sigaction(handled[i], &action, 0);
    struct itimerval timer = {{WINDOW_SECONDS, 0}, {WINDOW_SECONDS, 0}};
    setitimer(ITIMER_REAL, &timer, 0);
    ptrace(PTRACE_CONT, program, 0, 0);
    for (unsigned long window = 0;;) {
        pid_t thread = waitpid(-1, &status, __WALL);
        int failure = thread < 0 ? errno : 0;
        if (window_over) {
            window_over = 0;
            write_waiting(memory, out, window);
            window++;
            set_breakpoints(memory);
        }
        if (failure == EINTR) continue;
        if (failure) break;
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            if (thread == program) break;
            continue;
        }
        int signal = WSTOPSIG(status), event = status >> 16;
        if (event == PTRACE_EVENT_EXEC) {
            ptrace(PTRACE_DETACH, thread, 0, 0);
            continue;
        }
        /* A new thread or process starts with SIGSTOP. */
        if (event || signal == SIGSTOP || (signal == SIGTRAP && was_breakpoint(thread, out, window))) signal = 0;
        ptrace(PTRACE_CONT, thread, 0, signal);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
