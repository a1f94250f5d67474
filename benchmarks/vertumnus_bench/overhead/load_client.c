/* A load that costs next to nothing: CONNECTIONS requests at a time, one epoll loop.
 *
 *   load_client PORT CONNECTIONS REQUESTS SECONDS SPREAD_MS REQUEST
 *
 * Sends the file REQUEST, with the 8 bytes @@@@@@@@ in it replaced by a number that counts, on each
 * connection again as soon as the answer is complete, until REQUESTS are answered or SECONDS are
 * over. Connection i begins after i/CONNECTIONS of SPREAD_MS. Prints {"open": N} once every
 * connection has had the first byte of an answer's body, and one JSON object at the end. An answer
 * that is not 200, not whole or without its [DONE] is an error, and its connection is replaced.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 256 };
static const char MARK[] = "@@@@@@@@";
static const char SENT[] = "\"sent_us\":";

typedef struct {
    int fd, was_open;
    long begins_us, sent_us;
    size_t sent;             /* bytes of the request */
    char *in;                /* the answer so far */
    size_t size, room, seen; /* seen: up to where it was searched for events */
    long head;               /* its head's size, 0 while incomplete */
    long length;             /* its body's size, -1 if chunked */
    int is_stream;
    char number[9];
} Conn;

typedef struct {
    unsigned *at;
    size_t count, room;
} Sample;

static int port, poller, pending, opened, connections;
static long wanted, begun, ended, errors, broken, deadline_us;
static char *request;
static size_t request_size;
static long mark = -1;
static Sample whole, first, event;

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void add(Sample *s, long us) {
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 4096;
        s->at = realloc(s->at, s->room * sizeof *s->at);
    }
    s->at[s->count++] = us < 0 ? 0 : us > 0xffffffffL ? 0xffffffffu : (unsigned)us;
}

static int by_size(const void *a, const void *b) {
    unsigned x = *(const unsigned *)a, y = *(const unsigned *)b;
    return (x > y) - (x < y);
}

static void print_sample(const char *name, Sample *s) {
    qsort(s->at, s->count, sizeof *s->at, by_size);
    if (s->count == 0) printf(", \"%s\": null", name);
    else
        printf(", \"%s\": {\"count\": %zu, \"p50_us\": %u, \"p99_us\": %u, \"max_us\": %u}", name,
               s->count, s->at[s->count / 2], s->at[s->count * 99 / 100], s->at[s->count - 1]);
}

static void hang_up(Conn *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void dial(Conn *c) {
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    connect(c->fd, (struct sockaddr *)&there, sizeof there);
    struct epoll_event want = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &want);
}

static void go_on(Conn *c) {
    while (c->fd >= 0 && c->sent < request_size) {
        const char *from = request + c->sent;
        size_t size = request_size - c->sent;
        if (mark >= 0) { /* before, in and behind the number */
            size_t at = c->sent, begin = mark, end = mark + 8;
            if (at < begin) size = begin - at;
            else if (at < end) from = c->number + (at - begin), size = end - at;
        }
        int more = c->sent + size < request_size ? MSG_MORE : 0;
        ssize_t put = send(c->fd, from, size, MSG_NOSIGNAL | more);
        if (put < 0) return; /* not connected yet, full, or broken: epoll says which */
        c->sent += put;
    }
}

static void begin(Conn *c) {
    if (begun >= wanted || now_us() >= deadline_us) {
        hang_up(c);
        pending--;
        return;
    }
    snprintf(c->number, sizeof c->number, "%08u", (unsigned)(begun++ % 100000000));
    c->sent = c->size = c->seen = c->head = 0;
    if (c->fd < 0) dial(c);
    c->sent_us = now_us();
    go_on(c);
}

static void fail(Conn *c, const char *why) {
    if (errors++ < 3) fprintf(stderr, "load_client: %s: %.*s\n", why, (int)c->size, c->in);
    hang_up(c);
    begin(c);
}

/* The head of the answer, if it is complete. */
static int read_head(Conn *c) {
    c->in[c->size] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (end == NULL) return 1;
    if (strncmp(c->in, "HTTP/1.1 200", 12) != 0) return 0;
    *end = 0;
    char *length = strcasestr(c->in, "\r\ncontent-length:");
    c->length = length == NULL ? -1 : atol(length + 17);
    c->is_stream = strcasestr(c->in, "text/event-stream") != NULL;
    *end = '\r';
    c->head = c->seen = end + 4 - c->in;
    return 1;
}

static int is_whole(Conn *c) {
    if (c->length >= 0) return (long)c->size >= c->head + c->length;
    return (long)c->size >= c->head + 5 && memcmp(c->in + c->size - 5, "0\r\n\r\n", 5) == 0;
}

static void count_events(Conn *c, long now) {
    char *at;
    while ((at = memmem(c->in + c->seen, c->size - c->seen, SENT, sizeof SENT - 1)) != NULL) {
        char *number = at + sizeof SENT - 1;
        if (number + 16 > c->in + c->size) return;
        add(&event, now - atol(number));
        c->seen = number + 16 - c->in;
    }
}

static void readable(Conn *c) {
    for (;;) {
        if (c->room - c->size < 8192) {
            c->room = c->room ? 2 * c->room : 16384;
            c->in = realloc(c->in, c->room + 1);
        }
        ssize_t got = recv(c->fd, c->in + c->size, c->room - c->size, 0);
        if (got < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;
        if (got <= 0) {
            broken++;
            return fail(c, got < 0 ? strerror(errno) : "closed in the middle");
        }
        long now = now_us();
        int had_body = c->head > 0 && (long)c->size > c->head;
        c->size += got;
        if (c->head == 0 && !read_head(c)) return fail(c, "not 200");
        if (c->head == 0) continue;
        if (!had_body && (long)c->size > c->head) {
            add(&first, now - c->sent_us);
            if (!c->was_open) {
                c->was_open = 1;
                if (++opened == connections) {
                    printf("{\"open\": %d}\n", opened);
                    fflush(stdout);
                }
            }
        }
        if (c->is_stream) count_events(c, now);
        if (!is_whole(c)) continue;
        if (c->is_stream && memmem(c->in + c->seen, c->size - c->seen, "[DONE]", 6) == NULL)
            return fail(c, "no [DONE]");
        add(&whole, now - c->sent_us);
        ended++;
        return begin(c);
    }
}

int main(int argc, char **argv) {
    if (argc != 7)
        return fprintf(stderr,
                       "usage: load_client PORT CONNECTIONS REQUESTS SECONDS SPREAD_MS REQUEST\n"),
               2;
    port = atoi(argv[1]);
    connections = pending = atoi(argv[2]);
    wanted = atol(argv[3]);
    long begin_us = now_us(), spread_us = 1000 * atol(argv[5]);
    deadline_us = begin_us + (long)(1e6 * atof(argv[4]));
    FILE *file = fopen(argv[6], "r");
    if (file == NULL) return perror(argv[6]), 1;
    request = malloc(64 << 20);
    request_size = fread(request, 1, 64 << 20, file);
    fclose(file);
    char *found = memmem(request, request_size, MARK, 8);
    if (found != NULL) mark = found - request;
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(0);
    Conn *all = calloc(connections, sizeof *all);
    for (int i = 0; i < connections; i++) {
        all[i].fd = -1;
        all[i].begins_us = begin_us + spread_us * i / connections;
    }
    struct epoll_event ready[BATCH];
    int started = 0;
    while (pending > 0) {
        int wait_ms = 1000;
        while (started < connections && all[started].begins_us <= now_us()) begin(&all[started++]);
        if (started < connections) {
            long left = all[started].begins_us - now_us();
            wait_ms = left <= 0 ? 0 : (int)(left / 1000) + 1;
        }
        int count = epoll_wait(poller, ready, BATCH, wait_ms);
        for (int i = 0; i < count; i++) {
            Conn *c = ready[i].data.ptr;
            if (c->fd < 0) continue;
            if (ready[i].events & EPOLLOUT) go_on(c);
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
        }
        if (count == 0 && now_us() > deadline_us + 30000000L) {
            fprintf(stderr, "load_client: %d answers did not come within 30 s\n", pending);
            errors += pending;
            break;
        }
    }
    double seconds = (now_us() - begin_us) / 1e6;
    printf("{\"requests\": %ld, \"errors\": %ld, \"broken\": %ld, \"seconds\": %.6f", ended, errors,
           broken, seconds);
    print_sample("whole", &whole);
    print_sample("first", &first);
    print_sample("event", &event);
    printf("}\n");
    return 0;
}
