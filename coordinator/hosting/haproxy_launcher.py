"""Starts in place of the HAProxy program of Ray Serve, corrects its configuration and becomes HAProxy.

    python -I -S haproxy_launcher.py HAPROXY HOST FRONTENDS TLS_FOLDER VERIFY HAPROXY'S ARGUMENTS...

Serve writes the configuration. Its public, statistics and Prometheus listeners all use the replicas' address, or all
addresses. Here only the two public listeners, on the ports that FRONTENDS names ("8000,9000"), use HOST, and the others
the loopback. HOST is `*` for all addresses, IPv6 and IPv4, which HAProxy's own `*` is not; an IPv6 address is in
brackets. They reveal nothing of Serve to strangers. Anything unknown in the configuration is an error: no proxy is
better than one open to more than was asked for.

With a TLS_FOLDER ("" for none) the public listeners accept only TLS, with its `tls.crt` and `tls.key`; if VERIFY is
"required" they admit only clients with certificates signed by its `ca.crt`. A second process watches the files and
passes new ones to HAProxy, which keeps its connections.

Connections that do not send the head of a request, or are idle after an answer, are closed soon: Serve has no bound for
either, and each would occupy one of a few thousand for an hour. So are connections that read nothing of an answer: the
replica has given it up by then, and HAProxy would keep the rest of it. An address has at most PER_FREE connections for
each that is still free, so that whoever comes from another one, a probe above all, finds some. A load balancer, from
whose address all come, has four fifths of them.

A request whose replica is lost before the first byte of its answer goes to another one, and its client sees only a
delay: it has seen nothing of the answer, and workers end what the lost replica had begun. For that HAProxy keeps
requests up to REQUEST_BYTES_MAX with their heads; a longer one is answered with 502. At most RETRIES other replicas are
tried, for a request may be what brings replicas down.

Errors of HAProxy itself, and of a replica's HTTP parser before our code, get the shape of our errors and a cause: for
example 503 with a time to come back if there is no replica. Serve would send pages for browsers, 500 for overload, and
404, which clients do not retry, for an application that has not started or is leaving. Input that is not HTTP at all
gets HAProxy's own page.

Data is not spliced: with splicing HAProxy 2.8 stops reading from a client that waits for an answer on a reused
connection, does not see it leave, and the workers generate the whole output for nobody.

The process dies with its parent, as no part of a Ray system may outlive the rest.

It uses the standard library's core only: the file runs by itself, without site packages, in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
import time

LOOPBACK = "127.0.0.1"
_ALL = "[::]"
LOOK_EVERY_S = 2.0
_ADMIN_TIMEOUT_S = 5.0
_BIND = re.compile(r"^(\s*bind\s+)(\S*):(\d+)(.*)$", re.MULTILINE)
_SPLICE = re.compile(r"^\s*option\s+splice-\w+[^\S\n]*\n", re.MULTILINE)
_GLOBAL = re.compile(r"^global[^\S\n]*$", re.MULTILINE)
_DEFAULTS = re.compile(r"^defaults[^\S\n]*$", re.MULTILINE)
RETRIES = 2
REQUEST_BYTES_MAX = 65536
"""Largest request that is kept; HAProxy's buffers have that size, for each request until its answer begins and for each
answer on its way."""
BODY_TIME_S = 60
"""Longest wait for the body of a request that is kept; the replica has the same bound for all of a body."""
_OWN = re.compile(r"^\s*(?:retry-on|retries|tune\.bufsize|errorfile\s+50\d)\s.*\n", re.MULTILINE)
_BACKEND = re.compile(r"^(backend\s+\S+)[^\S\n]*$", re.MULTILINE)
# A body that is too long to be kept, or of unknown length, is passed on as it comes: a stranger is refused at once. So
# are the questions of gRPC's reflection, whose client asks the next one when it has the answer: its body has no end
# before.
_BUFFERED = (
    f"    http-request wait-for-body time {BODY_TIME_S}s "
    f"unless {{ req.body_size gt {REQUEST_BYTES_MAX - 1024} }} or {{ req.hdr(Transfer-Encoding) -m found }} "
    "or { path_beg /grpc.reflection. }"
)


# The application has not started, or is leaving.
_NO_APPLICATION = re.compile(
    r"^(\s*http-request return) status 404 content-type text/plain lf-string .*$", re.MULTILINE
)
_NO_GRPC_APPLICATION = re.compile(r'hdr grpc-status 5 hdr grpc-message ".*?"(?=$| if )', re.MULTILINE)
_NO_GRPC_REPLICA = 'hdr grpc-status 14 hdr grpc-message "no replica is ready; try again soon"'
_DEFAULT_LINES = f"""\
    timeout http-request 10s
    timeout http-keep-alive 75s
    retry-on conn-failure empty-response
    retries {RETRIES}"""
# Bounds the system's buffers of an answer between a replica and a slow client. They would grow to tens of megabytes,
# and the replica would think that the client had read them.
_BUFFERS = f"    tune.rcvbuf.server 131072\n    tune.sndbuf.client 131072\n    tune.bufsize {REQUEST_BYTES_MAX}"
# Limit on the time in which a client takes no bytes, not even into its system's buffers.
_UNREAD = "tcp-ut 2m"
PER_FREE = 4
_CONNECTIONS_MAX = re.compile(r"^\s*maxconn\s+(\d+)", re.MULTILINE)
_ADDRESSES = "outrider_addresses"
# Connections by address, and those of all together as `::`, which is nobody's. Of IPv6 a client has a whole network.
_ADDRESS_TABLE = f"backend {_ADDRESSES}\n    stick-table type ipv6 size 64k expire 2m store conn_cur\n"
_ADMIN_SOCKET = re.compile(r"^\s*stats\s+socket\s+(\S+)", re.MULTILINE)
_PR_SET_PDEATHSIG = 1
_HTTP2 = " proto h2"
# Serve's list of applications is not for strangers.
_LIST = "/ray.serve.RayServeAPIService/ListApplications"
_ERRORS = {
    400: ("the request is not HTTP as it may be sent: its first line, a header, its length or its chunks", "", 0),
    404: ("there is nothing at this path", "not_found", 0),
    408: ("the request has not come in time", "request_timeout", 0),
    413: ("the request is too large", "", 0),
    431: ("the request's head is too large", "", 0),
    502: ("the replica that had the request ended before it answered", "unavailable", 1),
    503: ("no replica of the coordinator can take the request right now", "unavailable", 5),
    504: ("the replica that had the request did not answer in time", "unavailable", 1),
}  # fmt: skip
# HAProxy has no page of its own for the others.
_OWN_PAGES = (400, 404, 408, 413, 502, 503, 504)


def _json_page(status: int) -> str:
    """Arguments of an HAProxy rule that answers with this status."""
    message, code, retry_after_s = _ERRORS[status]
    kind = "service_unavailable_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code or None}
    # In single quotes only a single quote has a meaning.
    text = json.dumps({"error": error}).replace("'", "`")
    page = f"status {status} content-type application/json string '{text}'"
    return f"{page} hdr Retry-After {retry_after_s}" if retry_after_s else page


def _grpc_refusal(number: int, message: str, condition: str) -> str:
    return f'    http-request return status 200 hdr grpc-status {number} hdr grpc-message "{message}" if {condition}'


_HTTP_RULES = "\n".join(
    (
        f"    http-request return {_json_page(404)} if {{ path,url_dec -i /-/routes }}",
        # The parser's errors are plain text, ours never are.
        *(
            f"    http-response return {_json_page(status)} "
            f"if {{ status {status} }} {{ res.hdr(content-type) -m beg text/plain }}"
            for status in (400, 413, 431)
        ),
    )
)
_GRPC_RULES = "\n".join(
    (
        # gRPC resets calls that are not gRPC, which looks like a lost replica.
        "    http-request return status 405 hdr Allow POST unless METH_POST",
        "    http-request return status 415 unless { req.hdr(content-type) -m beg application/grpc }",
        # HAProxy drops the `content-type` of an answer without a body; clients then do not take it for gRPC.
        "    http-after-response set-header content-type application/grpc "
        "if { res.hdr(grpc-status) -m found } !{ res.hdr(content-type) -m found }",
        _grpc_refusal(12, "not served", f"{{ path,url_dec {_LIST} }}"),
        # By it replicas bound the calls of each client that need no key.
        "    http-request set-header x-client-address %[src]",
        # gRPC itself would report a server error.
        _grpc_refusal(
            3,
            "grpc-timeout must be up to 8 digits and a unit",
            "{ req.hdr(grpc-timeout) -m found } !{ req.hdr(grpc-timeout) -m reg ^[0-9]{1,8}[HMSmun]$ }",
        ),
    )
)


def _share_of_an_address(connections_max: int) -> str:
    """Rules that refuse a connection if its address has more than PER_FREE times those that are free."""
    return (
        f"    tcp-request connection track-sc0 src,ipmask(32,64) table {_ADDRESSES}\n"
        f"    tcp-request connection track-sc1 str(::) table {_ADDRESSES}\n"
        f"    tcp-request connection set-var(sess.taken) sc1_conn_cur,mul({PER_FREE})\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur,add(sess.taken) gt {PER_FREE * connections_max} }}"
    )


def rewritten(
    configuration: str, host: str, public_ports: frozenset[int], tls_folder: str = "", verify: str = "none"
) -> str:
    """Rewrites Serve's configuration: listeners' addresses, limits, errors and retries. Raises ValueError for a
    listener that is no host and port, and for a missing section or limit."""
    lines = re.findall(r"^\s*bind\s.*$", configuration, re.MULTILINE)
    if not lines or not all(_BIND.fullmatch(line) for line in lines):
        raise ValueError(f"cannot read HAProxy's listeners: {lines}")

    found = _CONNECTIONS_MAX.search(configuration)
    if found is None:
        raise ValueError("HAProxy's configuration does not say how many connections there may be (maxconn)")
    share = _share_of_an_address(int(found[1]))
    families = "v4v6 " if host == _ALL else ""

    def listener(found: re.Match[str]) -> str:
        before, _, port, after = found.groups()
        if int(port) not in public_ports:
            return f"{before}{LOOPBACK}:{port}{after}"
        is_grpc = _HTTP2 in after
        if tls_folder:
            protocols = "h2" if is_grpc else "h2,http/1.1"
            after = after.replace(_HTTP2, "") + (
                f" ssl crt {tls_folder}/tls.crt ca-file {tls_folder}/ca.crt verify {verify} alpn {protocols}"
            )
        return f"{before}{host}:{port}{after} {families}{_UNREAD}\n{share}\n{_GRPC_RULES if is_grpc else _HTTP_RULES}"

    pages = "\n".join(f"    http-error {_json_page(status)}" for status in _OWN_PAGES)
    configuration = _OWN.sub("", _SPLICE.sub("", configuration))
    configuration = _BACKEND.sub(lambda found: f"{found[1]}\n{_BUFFERED}", configuration)
    configuration = _NO_APPLICATION.sub(lambda found: f"{found[1]} {_json_page(503)}", configuration)
    configuration = _NO_GRPC_APPLICATION.sub(_NO_GRPC_REPLICA, configuration)
    configuration, num_changed = _DEFAULTS.subn(
        lambda _: f"defaults\n{_DEFAULT_LINES}\n{pages}", _BIND.sub(listener, configuration), count=1
    )
    if not num_changed:
        raise ValueError("HAProxy's configuration has no defaults section")
    options = _BUFFERS
    if tls_folder:
        # The key has its own file, named as the certificate's without the last part.
        options += "\n    ssl-load-extra-del-ext\n    ssl-load-extra-files key\n"
        options += "    ssl-default-bind-options ssl-min-ver TLSv1.2"
    configuration, num_changed = _GLOBAL.subn(f"global\n{options}", configuration, count=1)
    if not num_changed:
        raise ValueError("HAProxy's configuration has no global section")
    return f"{configuration.rstrip()}\n{_ADDRESS_TABLE}"


def all_addresses(host: str) -> str:
    """The host for `rewritten`: `*` is IPv6 and IPv4, where this machine has both."""
    return _ALL if host == "*" and has_ipv6() else host


def has_ipv6() -> bool:
    """Whether this machine can listen on IPv6: a kernel may be without it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def keep_handing_over(folder: str, admin_socket: str) -> None:
    """Passes the folder's files to HAProxy whenever they have changed, including a change since HAProxy's start. Does
    not return."""
    handed, told = None, ""
    while True:
        time.sleep(LOOK_EVERY_S)
        try:
            found = _contents(folder)
            if found == handed:
                continue
            refusal = hand_over(folder, found, admin_socket)
        except OSError as error:  # in the middle of a change, or HAProxy is being replaced
            refusal = str(error)
        else:
            handed = None if refusal else found
        outcome = f"does not take them, and shows those of before: {refusal}" if refusal else "shows them"
        if outcome != told:
            print(f"certificates in {folder}: HAProxy {outcome}", file=sys.stderr, flush=True)
            told = outcome


def hand_over(folder: str, contents: tuple[bytes, bytes, bytes], admin_socket: str) -> str:
    """Passes certificate, key and authority to HAProxy; returns its refusal, or "". Raises OSError."""
    certificate, key, authority = contents
    pairs = (("cert", "tls.crt", certificate + b"\n" + key), ("ca-file", "ca.crt", authority))
    for kind, name, payload in pairs:
        lines = b"\n".join(line for line in payload.splitlines() if line.strip())  # an empty one would end it
        answer = _ask(admin_socket, f"set ssl {kind} {folder}/{name} <<\n".encode() + lines + b"\n\n")
        answer += _ask(admin_socket, f"commit ssl {kind} {folder}/{name}\n".encode())
        if "Success" not in answer:
            _ask(admin_socket, f"abort ssl {kind} {folder}/{name}\n".encode())
            return " ".join(answer.split())
    return ""


def _contents(folder: str) -> tuple[bytes, bytes, bytes]:
    found = []
    for name in ("tls.crt", "tls.key", "ca.crt"):
        with open(os.path.join(folder, name), "rb") as file:
            found.append(file.read())
    return found[0], found[1], found[2]


def _ask(admin_socket: str, command: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ADMIN_TIMEOUT_S)
        connection.connect(admin_socket)
        connection.sendall(command)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    return answer.decode(errors="replace")


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def main(arguments: list[str]) -> None:
    """Corrects the configuration and becomes HAProxy; does not return."""
    program, host, ports, tls_folder, verify, *rest = arguments
    path = rest[rest.index("-f") + 1]
    with open(path, encoding="utf-8") as file:
        given = file.read()
    configuration = rewritten(given, all_addresses(host), frozenset(map(int, ports.split(","))), tls_folder, verify)
    with open(path, "w", encoding="utf-8") as file:
        file.write(configuration)
    _die_with(os.getppid())
    admin_socket = _ADMIN_SOCKET.search(configuration)
    if tls_folder and admin_socket is not None:
        parent = os.getpid()
        if os.fork() == 0:
            _die_with(parent)
            keep_handing_over(tls_folder, admin_socket.group(1))
    os.execv(program, [program, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
