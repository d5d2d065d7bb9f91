/* The floor of a 4 KiB read through NBD, over iSER or over Traditional iSCSI, of a 4 KiB write over
 * the latter, and of a read over that by a program itself: the system calls, copies, checksums and
 * wake-ups that they cannot do without, and nothing else.
 *
 *     floor target FILE                    prints "ready PORT"
 *     floor server PORT SIZE SOCKET        prints "ready SOCKET"; SIZE: bytes of the export
 *     floor iscsi HOST:PORT SIZE SOCKET IQN LUN
 *                                          the same, with a LUN of an iSCSI target, and writes
 *     floor load HOST:PORT SIZE IQN LUN BLOCK DEPTH SECONDS
 *                                          reads that LUN itself, at random places, BLOCK bytes at
 *                                          a time; prints "REQUESTS SECONDS"
 *
 * Messages are as long as those of iSER on software iWARP, and have their CRC32C, but say no more
 * than the floor needs. The server takes one NBD client after another. What it does for a request:
 * it receives the request, sends a command, receives the data and the response, checks both, copies
 * the data to where it belongs, and sends the reply from there. The target receives the command,
 * checks it, reads the file, and sends the data with the response. Whatever has come meanwhile
 * shares each wait, receive and send. Neither looks on between messages: both sleep.
 *
 * Over Traditional iSCSI the target is any that asks for no authentication, and has blocks of 512
 * bytes. The server logs in (RFC 7143, section 6), and asks no more than it must. The data of a
 * write go with its command, from where they were received: immediate data, which are allowed
 * unless the target objects. Where answers come singly, the target may run first, as with iserblk.
 *
 * Fails, with a line on stderr, at whatever is not as it should be. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <isa-l/crc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
	BLOCK = 4096,
	CRC = 4,
	CONTROL = 96,     /* a Send: DDP header 20, iSER header 28, BHS 48 */
	TAGGED = 16,      /* the DDP header of an RDMA Write */
	CONTROL_FRAME = CONTROL + CRC,
	DATA_FRAME = TAGGED + BLOCK + CRC,
	ANSWER = DATA_FRAME + CONTROL_FRAME,
	MOST = 256,       /* requests in flight */
	STAGING = 512 << 10,
	SINGLY = 4,       /* fewer answers at once than this */
	REPLY = 16,       /* NBD */
	REQUEST = 28,
	OPTION = 16,
	NBD_READ = 0,
	NBD_WRITE = 1,
	NBD_DISC = 2,
	BHS = 48,         /* the header of an iSCSI PDU */
	SCSI_COMMAND = 0x01,
	LOGIN = 0x03,
	SCSI_RESPONSE = 0x21,
	LOGIN_RESPONSE = 0x23,
	DATA_IN = 0x25,
};

enum { COMMAND = 1, DATA, RESPONSE };

struct head {
	uint16_t kind;
	uint16_t slot;
	uint32_t reserved;
	uint64_t offset;
};

static void fail(const char *what)
{
	fprintf(stderr, "floor: %s: %s\n", what, errno ? strerror(errno) : "not understood");
	exit(1);
}

static long check(long result, const char *what)
{
	if (result < 0)
		fail(what);
	return result;
}

static void refuse(const char *what)
{
	errno = 0;
	fail(what);
}

static uint32_t crc(const void *data, int length)
{
	return ~crc32_iscsi((unsigned char *)data, length, ~0U);
}

static void seal(unsigned char *frame, int length)
{
	uint32_t value = crc(frame, length);
	memcpy(frame + length, &value, CRC);
}

static struct head opened(const unsigned char *frame, int length)
{
	struct head head;
	uint32_t value;
	memcpy(&value, frame + length, CRC);
	if (value != crc(frame, length))
		refuse("a CRC");
	memcpy(&head, frame, sizeof head);
	return head;
}

/* Where the other end has gone, receiving finds that out. */
static void send_all(int fd, struct iovec *vectors, int count)
{
	struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
	while (message.msg_iovlen) {
		ssize_t done = sendmsg(fd, &message, MSG_NOSIGNAL);
		if (done < 0 && (errno == EPIPE || errno == ECONNRESET))
			return;
		size_t sent = check(done, "send");
		while (message.msg_iovlen && sent >= message.msg_iov->iov_len) {
			sent -= message.msg_iov->iov_len;
			message.msg_iov++;
			message.msg_iovlen--;
		}
		if (message.msg_iovlen) {
			message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + sent;
			message.msg_iov->iov_len -= sent;
		}
	}
}

/* As iserblk's own connections within a machine: without delays, not paced. */
static int tcp_socket(void)
{
	int fd = check(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
	int one = 1;
	check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), "TCP_NODELAY");
	setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
	return fd;
}

static struct sockaddr_in loopback(int port)
{
	return (struct sockaddr_in){
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* HOST:PORT; the host is a number. */
static struct sockaddr_in address_of(char *portal)
{
	char *colon = strrchr(portal, ':');
	struct sockaddr_in there = {.sin_family = AF_INET};
	if (colon)
		*colon = 0;
	if (!colon || inet_pton(AF_INET, portal, &there.sin_addr) != 1)
		refuse("HOST:PORT");
	there.sin_port = htons(atoi(colon + 1));
	return there;
}

static int waiting_for(int one, int other)
{
	int poll = check(epoll_create1(EPOLL_CLOEXEC), "epoll");
	int both[] = {one, other};
	for (int i = 0; i < (other < 0 ? 1 : 2); i++) {
		struct epoll_event event = {.events = EPOLLIN, .data.fd = both[i]};
		check(epoll_ctl(poll, EPOLL_CTL_ADD, both[i], &event), "epoll");
	}
	return poll;
}

static int wait_for(int poll, struct epoll_event *events, int most)
{
	int count;
	do
		count = epoll_wait(poll, events, most, -1);
	while (count < 0 && errno == EINTR);
	return check(count, "epoll");
}

static unsigned char staging[STAGING];

/* -- the target ---------------------------------------------------------------------------------- */

static unsigned char answers[MOST][ANSWER];

static void serve(int connection, int file)
{
	int poll = waiting_for(connection, -1);
	size_t have = 0;
	for (;;) {
		struct iovec vectors[MOST];
		struct epoll_event event;
		size_t at = 0;
		int count = 0;
		wait_for(poll, &event, 1);
		/* No more than there are answers for at once. */
		ssize_t came = recv(connection, staging + have, MOST * CONTROL_FRAME - have, MSG_DONTWAIT);
		if (!came || (came < 0 && errno == ECONNRESET))
			break;
		if (came < 0 && errno == EAGAIN)
			continue;
		have += check(came, "receive");
		for (; have - at >= CONTROL_FRAME; at += CONTROL_FRAME) {
			struct head head = opened(staging + at, CONTROL);
			unsigned char *answer = answers[count], *response = answer + DATA_FRAME;
			if (head.kind != COMMAND)
				refuse("a command");
			if (pread(file, answer + TAGGED, BLOCK, head.offset) != BLOCK)
				fail("the file");
			head.kind = DATA;
			memcpy(answer, &head, sizeof head);
			seal(answer, TAGGED + BLOCK);
			head.kind = RESPONSE;
			memcpy(response, &head, sizeof head);
			seal(response, CONTROL);
			vectors[count++] = (struct iovec){answer, ANSWER};
		}
		have -= at;
		memmove(staging, staging + at, have);
		if (count)
			send_all(connection, vectors, count);
	}
	close(poll);
}

static void run_target(const char *path)
{
	int file = check(open(path, O_RDONLY | O_CLOEXEC), path);
	int listener = tcp_socket();
	struct sockaddr_in address = loopback(0);
	socklen_t length = sizeof address;
	check(bind(listener, (void *)&address, length), "bind");
	check(listen(listener, 1), "listen");
	check(getsockname(listener, (void *)&address, &length), "getsockname");
	printf("ready %d\n", ntohs(address.sin_port));
	fflush(stdout);
	for (;;) {
		int connection = check(accept4(listener, NULL, NULL, SOCK_CLOEXEC), "accept");
		serve(connection, file);
		close(connection);
	}
}

/* -- the server ---------------------------------------------------------------------------------- */

static uint64_t size;
static unsigned char received[MOST * (REQUEST + BLOCK)];  /* of the NBD client */
static size_t unparsed;
static unsigned char commands[MOST][CONTROL_FRAME];
static int iscsi;                               /* the target speaks Traditional iSCSI */
static unsigned char lun[8];
static uint32_t cmd_sn, exp_stat_sn, max_cmd_sn;
static unsigned char replies[MOST][REPLY + BLOCK];
static size_t reply_length[MOST];
static int unused[MOST], free_slots;
static uint32_t block = BLOCK;                  /* bytes of a read */
static unsigned char *data[MOST];               /* where those of a slot belong */
static double until;                            /* by now(): no read of our own begins later; 0: none */
static unsigned long reads;                     /* of our own, that have ended */
static int came;                                /* answers, when last there were any */
static int takes_data = 1;                      /* the target takes that of a write at once */

/* 0: the client has gone. */
static int receive_exactly(int client, void *data, size_t length)
{
	if (!length)
		return 1;
	ssize_t came = recv(client, data, length, MSG_WAITALL);
	return came > 0 && (size_t)came == length;
}

/* NBD's handshake, as far as a client without wishes needs it. 0: it has gone. */
static int shake_hands(int client)
{
	unsigned char greeting[18] = "NBDMAGICIHAVEOPT\0\3", option[OPTION], words[4096], answer[20] = {0};
	uint32_t flags, length, kind;
	struct iovec whole = {greeting, sizeof greeting};
	send_all(client, &whole, 1);
	if (!receive_exactly(client, &flags, sizeof flags))
		return 0;
	for (;;) {
		if (!receive_exactly(client, option, OPTION))
			return 0;
		memcpy(&kind, option + 8, 4);
		memcpy(&length, option + 12, 4);
		length = be32toh(length);
		if (memcmp(option, "IHAVEOPT", 8) || length > sizeof words)
			refuse("an option of the client");
		if (!receive_exactly(client, words, length))
			return 0;
		if (be32toh(kind) == 1)  /* EXPORT_NAME */
			break;
		if (be32toh(kind) == 2)  /* ABORT */
			return 0;
		uint64_t magic = htobe64(0x3e889045565a9);
		uint32_t unsupported = htobe32(0x80000001);
		memcpy(answer, &magic, 8);
		memcpy(answer + 8, &kind, 4);
		memcpy(answer + 12, &unsupported, 4);
		whole = (struct iovec){answer, 20};
		send_all(client, &whole, 1);
	}
	unsigned char export[10 + 124] = {0};
	uint64_t bytes = htobe64(size);
	uint16_t transmission = htobe16(iscsi ? 1 : 3);  /* HAS_FLAGS, READ_ONLY */
	memcpy(export, &bytes, 8);
	memcpy(export + 8, &transmission, 2);
	whole = (struct iovec){export, be32toh(flags) & 2 ? 10 : sizeof export};  /* NO_ZEROES */
	send_all(client, &whole, 1);
	return 1;
}

static void set_reply(unsigned char *reply, uint32_t error)
{
	uint32_t magic = htobe32(0x67446698);
	error = htobe32(error);
	memcpy(reply, &magic, 4);
	memcpy(reply + 4, &error, 4);
}

static void put32(unsigned char *at, uint32_t value)
{
	value = htobe32(value);
	memcpy(at, &value, 4);
}

static uint32_t get32(const unsigned char *at)
{
	uint32_t value;
	memcpy(&value, at, 4);
	return be32toh(value);
}

/* The BHS of a command without its CDB. ``direction``: its R or W bit. */
static void scsi_command(unsigned char *bhs, uint32_t tag, int direction, uint32_t expected)
{
	memset(bhs, 0, BHS);
	bhs[0] = SCSI_COMMAND;
	bhs[1] = 0x81 | direction;  /* final; a simple task */
	memcpy(bhs + 8, lun, sizeof lun);
	put32(bhs + 16, tag);
	put32(bhs + 20, expected);
	put32(bhs + 24, cmd_sn++);
	put32(bhs + 28, exp_stat_sn);
}

/* READ (16) or WRITE (16) of a block. */
static void block_command(unsigned char *bhs, int slot, int writes, uint64_t offset)
{
	uint64_t lba = htobe64(offset / 512);
	if ((int32_t)(max_cmd_sn - cmd_sn) < 0)
		refuse("so many commands at once, for this target");
	scsi_command(bhs, slot, writes ? 0x20 : 0x40, block);
	bhs[32] = writes ? 0x8a : 0x88;
	if (writes && !takes_data)
		refuse("a target that takes no block of immediate data");
	if (writes)
		put32(bhs + 4, block);  /* all of it follows the BHS */
	memcpy(bhs + 34, &lba, 8);
	put32(bhs + 42, block / 512);
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* A read of our own in this slot, at any place. */
static struct iovec read_somewhere(int slot)
{
	block_command(commands[slot], slot, 0, (uint64_t)(drand48() * (size / block)) * block);
	return (struct iovec){commands[slot], BHS};
}

/* Takes the numbers of an answer; returns the length of its data segment without its padding. */
static uint32_t answered(const unsigned char *bhs)
{
	max_cmd_sn = get32(bhs + 32);
	if (bhs[4])
		refuse("an AHS");
	return get32(bhs + 4) & 0xffffff;
}

/* A command for each request. 0: the client has gone, or has said so. */
static int take_requests(int client, int target)
{
	struct iovec vectors[2 * MOST];
	int count = 0, going_on = 1;
	size_t at = 0, whole;
	ssize_t came = recv(client, received + unparsed, sizeof received - unparsed, MSG_DONTWAIT);
	if (came < 0 && errno == EAGAIN)
		return 1;
	if (came <= 0)
		return 0;
	for (unparsed += came; going_on && unparsed - at >= REQUEST; at += whole) {
		unsigned char *request = received + at;
		uint32_t magic, length;
		uint16_t kind;
		uint64_t offset;
		memcpy(&magic, request, 4);
		memcpy(&kind, request + 6, 2);
		memcpy(&offset, request + 16, 8);
		memcpy(&length, request + 24, 4);
		kind = be16toh(kind);
		offset = be64toh(offset);
		if (be32toh(magic) != 0x25609513)
			refuse("a request");
		int good = be32toh(length) == BLOCK && offset % BLOCK == 0 && offset < size;
		int writes = kind == NBD_WRITE;
		if (writes && !(good && iscsi))
			refuse("a write");
		whole = writes ? REQUEST + BLOCK : REQUEST;
		if (unparsed - at < whole)
			break;
		if (kind == NBD_DISC) {
			going_on = 0;
		} else if (!(good && (writes || kind == NBD_READ))) {
			unsigned char reply[REPLY];
			struct iovec answer = {reply, REPLY};
			set_reply(reply, EINVAL);
			memcpy(reply + 8, request + 8, 8);
			send_all(client, &answer, 1);
		} else {
			if (!free_slots)
				refuse("so many requests at once");
			int slot = unused[--free_slots];
			unsigned char *command = commands[slot];
			memcpy(replies[slot] + 8, request + 8, 8);  /* the cookie */
			reply_length[slot] = writes ? REPLY : REPLY + BLOCK;
			if (iscsi) {
				block_command(command, slot, writes, offset);
				vectors[count++] = (struct iovec){command, BHS};
				if (writes)
					vectors[count++] = (struct iovec){request + REQUEST, BLOCK};
			} else {
				struct head head = {COMMAND, slot, 0, offset};
				memcpy(command, &head, sizeof head);
				seal(command, CONTROL);
				vectors[count++] = (struct iovec){command, CONTROL_FRAME};
			}
		}
	}
	if (count)
		send_all(target, vectors, count);
	unparsed -= at;
	memmove(received, received + at, unparsed);
	return going_on;
}

/* What has come, behind the ``have`` bytes of staging. 0: nothing. */
static int receive_answers(int target, size_t *have)
{
	ssize_t came = recv(target, staging + *have, STAGING - *have, MSG_DONTWAIT);
	if (came < 0 && errno == EAGAIN)
		return 0;
	if (!came)
		refuse("the end of the target");
	*have += check(came, "receive");
	return 1;
}

/* ``client`` < 0: there is none any more. */
static void take_answers(int client, int target, size_t *have)
{
	struct iovec vectors[MOST];
	int count = 0;
	size_t at = 0;
	if (!receive_answers(target, have))
		return;
	while (*have - at >= CONTROL_FRAME) {
		uint16_t kind;
		memcpy(&kind, staging + at, 2);
		if (kind == DATA) {
			if (*have - at < DATA_FRAME)
				break;
			struct head head = opened(staging + at, TAGGED + BLOCK);
			memcpy(replies[head.slot % MOST] + REPLY, staging + at + TAGGED, BLOCK);
			at += DATA_FRAME;
		} else if (kind == RESPONSE) {
			struct head head = opened(staging + at, CONTROL);
			unsigned char *reply = replies[head.slot % MOST];
			if (free_slots == MOST)
				refuse("an answer");
			set_reply(reply, 0);
			unused[free_slots++] = head.slot % MOST;
			vectors[count++] = (struct iovec){reply, REPLY + BLOCK};
			at += CONTROL_FRAME;
		} else {
			refuse("a frame");
		}
	}
	*have -= at;
	memmove(staging, staging + at, *have);
	if (count && client >= 0)
		send_all(client, vectors, count);
}

/* As take_answers, of an iSCSI target: Data-Ins, with the status or before a response. */
static void take_pdus(int client, int target, size_t *have)
{
	struct iovec vectors[MOST];
	int count = 0, again;
	size_t at = 0;
	if (!receive_answers(target, have))
		return;
	again = until && now() < until;
	while (*have - at >= BHS) {
		unsigned char *bhs = staging + at;
		uint32_t length = answered(bhs), tag = get32(bhs + 16);
		size_t whole = BHS + ((length + 3) & ~3U);
		int kind = bhs[0] & 0x3f, status = kind == SCSI_RESPONSE;
		if (*have - at < whole)
			break;
		if (tag >= MOST || !data[tag] || free_slots == MOST || count == MOST)
			refuse("an answer");
		if (kind == DATA_IN) {
			uint32_t place = get32(bhs + 40);
			if (place > block || length > block - place)
				refuse("so much data");
			memcpy(data[tag] + place, bhs + BHS, length);
			status = bhs[1] & 1;
		} else if (!status) {
			refuse("a PDU");
		}
		if (status) {
			if ((kind == SCSI_RESPONSE && bhs[2]) || bhs[3] || bhs[1] & 6)
				refuse("a status, or a residual count");
			exp_stat_sn = get32(bhs + 24) + 1;
			reads++;
			if (again) {
				vectors[count++] = read_somewhere(tag);
			} else {
				set_reply(replies[tag], 0);
				unused[free_slots++] = tag;
				vectors[count++] = (struct iovec){replies[tag], reply_length[tag]};
			}
		}
		at += whole;
	}
	*have -= at;
	memmove(staging, staging + at, *have);
	came = count;
	if (count && (again || client >= 0))
		send_all(again ? target : client, vectors, count);
}

/* Sends a PDU and receives the one that follows into staging; returns the length of its data. */
static uint32_t exchange(int target, unsigned char *pdu, size_t length, int kind)
{
	struct iovec whole = {pdu, length};
	send_all(target, &whole, 1);
	if (!receive_exactly(target, staging, BHS))
		refuse("the end of the target");
	uint32_t data = answered(staging), padded = (data + 3) & ~3U;
	if ((staging[0] & 0x3f) != kind || padded > STAGING - BHS)
		refuse("an answer of the target");
	if (!receive_exactly(target, staging + BHS, padded))
		refuse("the end of the target");
	exp_stat_sn = get32(staging + 24) + 1;
	return data;
}

/* What the target says of this key in the text behind its BHS; NULL: nothing. */
static const char *said(const char *key, size_t length)
{
	size_t name = strlen(key);
	const char *at = (char *)staging + BHS, *end = at + length;
	for (; at < end; at += strnlen(at, end - at) + 1)
		if ((size_t)(end - at) > name && !memcmp(at, key, name) && at[name] == '=')
			return at + name + 1;
	return NULL;
}

/* Login in one exchange, and commands until the LUN has told of its start (unit attention). */
static void log_in(int target, const char *name, int number)
{
	static const char wishes[] =
		"InitiatorName=iqn.2026-11.org.iserblk:floor\0SessionType=Normal\0HeaderDigest=None\0"
		"DataDigest=None\0MaxRecvDataSegmentLength=262144\0ErrorRecoveryLevel=0\0"
		"MaxConnections=1\0DataPDUInOrder=Yes\0DataSequenceInOrder=Yes\0";
	unsigned char pdu[1024] = {0};
	size_t length = sizeof wishes - 1;
	memcpy(pdu + BHS, wishes, length);
	int more = snprintf((char *)pdu + BHS + length, 300, "TargetName=%s", name);
	if (more < 0 || more >= 300)
		refuse("so long a name");
	length += more + 1;
	pdu[0] = 0x40 | LOGIN;
	pdu[1] = 0x87;  /* from operational negotiation to the full feature phase */
	put32(pdu + 4, length);
	pdu[8] = 0x80;  /* ISID: a random one */
	put32(pdu + 9, getpid());
	length = exchange(target, pdu, BHS + ((length + 3) & ~3), LOGIN_RESPONSE);
	if (staging[36] || (staging[1] & 0x83) != 0x83 || (length && staging[BHS + length - 1]))
		refuse("the answer to the login");
	const char *immediate = said("ImmediateData", length);
	const char *most = said("MaxRecvDataSegmentLength", length);
	takes_data = !(immediate && !strcmp(immediate, "No")) && (!most || atoi(most) >= BLOCK);
	lun[1] = number;
	cmd_sn = get32(staging + 28);
	for (int tries = 4;;) {
		scsi_command(pdu, 0, 0, 0);  /* TEST UNIT READY */
		exchange(target, pdu, BHS, SCSI_RESPONSE);
		if (!staging[3])
			return;
		if (!--tries)
			refuse("the LUN's status");
	}
}

static void take(int client, int target, size_t *have)
{
	(iscsi ? take_pdus : take_answers)(client, target, have);
}

/* As iserblk does: where answers come singly, the target has this processor first, if it waits for
 * one. More of them then share what follows. */
static void give_way(void)
{
	if (iscsi && came < SINGLY && MOST - free_slots >= SINGLY)
		sched_yield();
}

static void wait_for_all(int target, size_t *have)
{
	int poll = waiting_for(target, -1);
	while (free_slots < MOST) {
		struct epoll_event event;
		wait_for(poll, &event, 1);
		give_way();
		take(-1, target, have);
	}
	close(poll);
}

static void serve_client(int client, int target, size_t *have)
{
	int poll = waiting_for(target, client);
	unparsed = 0;
	for (int going_on = 1; going_on;) {
		struct epoll_event events[2];
		int count = wait_for(poll, events, 2);
		give_way();
		for (int i = 0; i < count; i++)
			if (events[i].data.fd == target)
				take(client, target, have);
			else
				going_on = take_requests(client, target);
	}
	close(poll);
	wait_for_all(target, have);  /* what it has asked for still comes */
}

/* Keeps so many reads in flight. */
static void run_load(char *portal, char **lun_name, int depth, double seconds)
{
	int target = tcp_socket();
	struct sockaddr_in there = address_of(portal);
	struct iovec vectors[MOST];
	size_t have = 0;
	if (depth < 1 || depth > MOST || block < 512 || block % 512 || size < block)
		refuse("SIZE, BLOCK or DEPTH");
	check(connect(target, (void *)&there, sizeof there), "the target");
	iscsi = 1;
	log_in(target, lun_name[0], atoi(lun_name[1]));
	for (int slot = MOST; slot-- > depth;)
		unused[free_slots++] = slot;
	for (int slot = 0; slot < depth; slot++) {
		data[slot] = malloc(block);
		if (!data[slot])
			fail("memory");
		memset(data[slot], 1, block);  /* its pages are there */
	}
	double began = now();
	until = began + seconds;
	for (int slot = 0; slot < depth; slot++)
		vectors[slot] = read_somewhere(slot);
	send_all(target, vectors, depth);
	wait_for_all(target, &have);
	printf("%lu %f\n", reads, now() - began);
}

/* ``name``: of an iSCSI target, with the number of its LUN; NULL: the target is ours. */
static void run_server(struct sockaddr_in there, const char *path, const char *name, int number)
{
	int target = tcp_socket(), listener = check(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), path);
	struct sockaddr_un here = {.sun_family = AF_UNIX};
	size_t have = 0;
	if (strlen(path) >= sizeof here.sun_path)
		refuse("so long a path");
	strcpy(here.sun_path, path);
	check(connect(target, (void *)&there, sizeof there), "the target");
	iscsi = name != NULL;
	if (iscsi)
		log_in(target, name, number);
	check(bind(listener, (void *)&here, sizeof here), path);
	check(listen(listener, 8), path);
	for (free_slots = 0; free_slots < MOST; free_slots++) {
		unused[free_slots] = free_slots;
		data[free_slots] = replies[free_slots] + REPLY;
	}
	printf("ready %s\n", path);
	fflush(stdout);
	for (;;) {
		int client = check(accept4(listener, NULL, NULL, SOCK_CLOEXEC), "accept");
		if (shake_hands(client))
			serve_client(client, target, &have);
		close(client);
	}
}

int main(int count, char **words)
{
	if (count == 3 && !strcmp(words[1], "target")) {
		run_target(words[2]);
	} else if (count == 5 && !strcmp(words[1], "server")) {
		size = strtoull(words[3], NULL, 10) / BLOCK * BLOCK;
		run_server(loopback(atoi(words[2])), words[4], NULL, 0);
	} else if (count == 7 && !strcmp(words[1], "iscsi")) {
		size = strtoull(words[3], NULL, 10) / BLOCK * BLOCK;
		run_server(address_of(words[2]), words[4], words[5], atoi(words[6]));
	} else if (count == 9 && !strcmp(words[1], "load")) {
		size = strtoull(words[3], NULL, 10);
		block = strtoul(words[6], NULL, 10);
		run_load(words[2], words + 4, atoi(words[7]), atof(words[8]));
		return 0;
	}
	fprintf(stderr, "floor target FILE | floor server PORT SIZE SOCKET | "
			"floor iscsi HOST:PORT SIZE SOCKET IQN LUN | "
			"floor load HOST:PORT SIZE IQN LUN BLOCK DEPTH SECONDS\n");
	return 2;
}
