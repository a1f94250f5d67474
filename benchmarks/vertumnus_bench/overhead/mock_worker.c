/* An engine that costs next to nothing: answers HTTP on one port, one epoll loop.
 *
 *   mock_worker PORT POOL COMPOSITION
 *
 * POST answers a chat completion, or, when the body has "stream":true, one of `events` server-sent
 * events, `gap` microseconds apart, each with the time it was sent at (CLOCK_MONOTONIC, in
 * microseconds), then [DONE]. GET /vertumnus/pool and /vertumnus/composition answer the two files,
 * any other GET what routers ask a worker for. POST /mock/GAP/EVENTS sets both numbers.
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

enum { HEAD_BYTES = 64 * 1024, BATCH = 256 };

typedef struct Conn {
    int fd, is_get, streams, is_setting;
    size_t head_size;    /* bytes of the head so far */
    long body_left;      /* bytes of the body to come, -1 while in the head */
    int events_left;     /* of the answer that is being streamed */
    long due_us;         /* when the next event is */
    struct Conn *before, *behind; /* in the list of streams, ordered by due_us */
    char head[HEAD_BYTES + 1];
} Conn;

static long gap_us = 5000;
static int events = 16;
static int poller;
static Conn streams = {.before = &streams, .behind = &streams};

typedef struct {
    char *at;
    size_t size;
} Text;

static Text pool, composition;

static const char ABOUT[] =
    "{\"status\":\"ready\",\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"tp_size\":1,"
    "\"dp_size\":1,\"version\":\"0.5.23\",\"is_generation\":true,\"object\":\"list\","
    "\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"owned_by\":\"mock\"}]}";
static const char ANSWER[] =
    "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1700000000,"
    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"The quick brown fox jumps over the lazy dog.\"},\"logprobs\":null,\"finish_reason\":"
    "\"stop\"}],\"usage\":{\"prompt_tokens\":32,\"total_tokens\":42,\"completion_tokens\":10}}";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n";
static const char DONE[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void unlist(Conn *c) {
    if (c->before == NULL) return;
    c->before->behind = c->behind;
    c->behind->before = c->before;
    c->before = c->behind = NULL;
}

static void list_last(Conn *c) {
    c->before = streams.before;
    c->behind = &streams;
    streams.before->behind = c;
    streams.before = c;
}

static void drop(Conn *c) {
    unlist(c);
    close(c->fd);
    free(c);
}

/* Answers are far smaller than a socket's buffer: what does not fit at once is a dead client. */
static int write_all(Conn *c, const char *data, size_t size) {
    if (send(c->fd, data, size, MSG_NOSIGNAL) == (ssize_t)size) return 1;
    drop(c);
    return 0;
}

static int write_json(Conn *c, const char *body, size_t size) {
    char out[16 * 1024];
    int head = snprintf(out, sizeof out,
                        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                        "content-length: %zu\r\n\r\n", size);
    if (head + size > sizeof out) return drop(c), 0;
    memcpy(out + head, body, size);
    return write_all(c, out, head + size);
}

/* The next event of a stream, and with the last one its end; 0 if the client is gone. */
static int stream_event(Conn *c, int first) {
    char out[1024], event[512];
    int size = 0, length = snprintf(
        event, sizeof event,
        "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\","
        "\"created\":1700000000,\"model\":\"mock\",\"sent_us\":%016ld,\"choices\":[{\"index\":0,"
        "\"delta\":{\"content\":\" fox\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",
        now_us());
    if (first) size = snprintf(out, sizeof out, "%s", STREAM_HEAD);
    size += snprintf(out + size, sizeof out - size, "%x\r\n%s\r\n", length, event);
    c->events_left--;
    if (c->events_left == 0) size += snprintf(out + size, sizeof out - size, "%s", DONE);
    return write_all(c, out, size);
}

static int answer(Conn *c) {
    if (c->is_setting) {
        sscanf(c->head, "POST /mock/%ld/%d", &gap_us, &events);
        return write_json(c, "{}", 2);
    }
    if (c->is_get) {
        if (strncmp(c->head, "GET /vertumnus/pool", 19) == 0)
            return write_json(c, pool.at, pool.size);
        if (strncmp(c->head, "GET /vertumnus/composition", 26) == 0)
            return write_json(c, composition.at, composition.size);
        return write_json(c, ABOUT, sizeof ABOUT - 1);
    }
    if (!c->streams) return write_json(c, ANSWER, sizeof ANSWER - 1);
    c->events_left = events;
    if (!stream_event(c, 1)) return 0;
    if (c->events_left > 0) {
        c->due_us = now_us() + gap_us;
        list_last(c);
    }
    return 1;
}

static void begin_request(Conn *c) {
    c->head_size = 0;
    c->body_left = -1;
    c->streams = 0;
}

/* Look at the head once it is complete. Part of the body may be behind it. 0 if not complete. */
static int read_head(Conn *c) {
    c->head[c->head_size] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (end == NULL) return 0;
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->is_get = strncmp(c->head, "GET ", 4) == 0;
    c->is_setting = strncmp(c->head, "POST /mock/", 11) == 0;
    size_t behind = c->head + c->head_size - (end + 4);
    c->body_left = length != NULL && length < end ? atol(length + 17) : 0;
    c->streams = memmem(end, behind + 4, "\"stream\":true", 13) != NULL;
    c->body_left -= behind;
    return 1;
}

static void readable(Conn *c) {
    static char rest[1024 * 1024];
    for (;;) {
        ssize_t got;
        if (c->body_left < 0) {
            if (c->head_size == HEAD_BYTES) return drop(c);
            got = recv(c->fd, c->head + c->head_size, HEAD_BYTES - c->head_size, 0);
            if (got > 0) {
                c->head_size += got;
                if (!read_head(c)) continue;
            }
        } else {
            got = recv(c->fd, rest, sizeof rest, 0);
            if (got > 0) {
                c->streams |= memmem(rest, got, "\"stream\":true", 13) != NULL;
                c->body_left -= got;
            }
        }
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) return drop(c);
        if (c->body_left <= 0) {
            if (!answer(c)) return;
            begin_request(c);
        }
    }
}

static void accept_all(int listener) {
    int on = 1, fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        Conn *c = calloc(1, sizeof *c);
        c->fd = fd;
        begin_request(c);
        struct epoll_event want = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &want);
    }
}

/* One event for each stream that is due; how long to wait for the next, in milliseconds. */
static int stream_due(void) {
    long now = now_us();
    Conn *last = streams.before; /* streams that go on are put behind it */
    while (streams.behind != &streams && streams.behind->due_us <= now) {
        Conn *c = streams.behind;
        int ends = c == last;
        unlist(c);
        if (stream_event(c, 0) && c->events_left > 0) {
            c->due_us += gap_us;
            list_last(c);
        }
        if (ends) break;
    }
    if (streams.behind == &streams) return -1;
    long left = streams.behind->due_us - now_us();
    return left <= 0 ? 0 : (int)((left + 999) / 1000);
}

static int read_file(const char *path, Text *into) {
    FILE *file = fopen(path, "r");
    if (file == NULL) return perror(path), 0;
    into->at = malloc(HEAD_BYTES);
    into->size = fread(into->at, 1, HEAD_BYTES, file);
    fclose(file);
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: mock_worker PORT POOL COMPOSITION\n"), 2;
    if (!read_file(argv[2], &pool) || !read_file(argv[3], &composition)) return 1;
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&here, sizeof here) || listen(listener, 4096))
        return perror("mock_worker: cannot listen"), 1;
    poller = epoll_create1(0);
    struct epoll_event want = {.events = EPOLLIN, .data.ptr = NULL}, ready[BATCH];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &want);
    for (;;) {
        int count = epoll_wait(poller, ready, BATCH, stream_due());
        for (int i = 0; i < count; i++) {
            if (ready[i].data.ptr == NULL) accept_all(listener);
            else readable(ready[i].data.ptr);
        }
    }
}
